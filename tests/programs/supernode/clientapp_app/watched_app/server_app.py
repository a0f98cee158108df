"""An app needs a ServerApp, but this one never runs, because a SuperNode loads only the ClientApp."""

from flwr.serverapp import ServerApp

app = ServerApp()
