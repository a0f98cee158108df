"""An app whose clients look at their lease while they train."""
