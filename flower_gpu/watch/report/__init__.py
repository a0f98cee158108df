"""A page about a run, with pictures, made from its trace.

trace.jsonl -> History -> calls:  Clock (seconds of the run, without interruptions), calls with their phases,
                                  rows of clients
                       -> totals: each lease's part of a GPU, and sums
                       -> figures_*: pictures (matplotlib), with what is in drawing
                       -> page:   page.html.jinja -> report.html
"""
