"""The HTTP server: routes, wire formats and futures."""
