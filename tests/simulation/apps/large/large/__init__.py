"""An app with a client that needs much memory, while workers of others keep theirs."""
