"""Messages between clients and server: checked dataclasses, compression, array format."""
