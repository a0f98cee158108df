"""The only place that imports flwr."""
