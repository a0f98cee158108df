"""The operator's side: SuperNodes whose every message runs under a lease, whatever the app is."""
