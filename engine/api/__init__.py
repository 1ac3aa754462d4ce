"""The routes of the Tinker API, one subject a file."""
