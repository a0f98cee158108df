"""An app with a client that needs much memory while workers of other clients keep theirs."""
