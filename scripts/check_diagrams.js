// Parse every Mermaid diagram of Markdown files, and fail if one has a syntax error.
//
//   node scripts/check_diagrams.js MERMAID_JS FILE.md ...
//
// Browsers draw diagrams when a reader opens a page, so mkdocs cannot notice a broken one. Mermaid's parser needs no
// browser, but the library asks for a document while it is loaded. The few objects below satisfy it: DOMPurify, which
// Mermaid bundles, finds an incomplete document and returns every label unchanged.
"use strict";
const fs = require("node:fs");
const vm = require("node:vm");

globalThis.window = globalThis;
globalThis.Element = class {};
globalThis.addEventListener = () => {};
globalThis.document = {
  nodeType: 9,
  implementation: {},
  addEventListener: () => {},
  createElement: () => ({}),
  querySelectorAll: () => [],
};

const DIAGRAM = /^```mermaid\n(.*?)^```/gms;

async function main([library, ...pages]) {
  vm.runInThisContext(fs.readFileSync(library, "utf8"));
  let count = 0;
  for (const page of pages) {
    const text = fs.readFileSync(page, "utf8");
    for (const match of text.matchAll(DIAGRAM)) {
      count += 1;
      try {
        await globalThis.mermaid.parse(match[1]);
      } catch (error) {
        const line = text.slice(0, match.index).split("\n").length;
        console.error(`${page}:${line}: the diagram has a syntax error: ${error.message}`);
        process.exitCode = 1;
      }
    }
  }
  console.log(`${count} Mermaid diagrams parsed`);
}

main(process.argv.slice(2));
