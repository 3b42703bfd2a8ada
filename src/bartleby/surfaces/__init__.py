"""The doors: the command line, the console with the HTTP API, and tools for agents."""
