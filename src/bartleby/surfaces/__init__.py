"""The doors: command line, and later console, HTTP and MCP."""
