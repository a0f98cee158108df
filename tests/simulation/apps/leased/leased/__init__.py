"""An app whose clients inspect their lease while they train."""
