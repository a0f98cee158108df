"""An app in src/, as an installed package has it."""
