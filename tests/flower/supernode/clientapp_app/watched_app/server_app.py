"""Never run: a SuperNode only loads the ClientApp."""

from flwr.serverapp import ServerApp

app = ServerApp()
