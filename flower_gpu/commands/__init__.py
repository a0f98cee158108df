"""The subcommands of ``flower-gpu`` that look at this host."""
