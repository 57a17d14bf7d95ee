"""The parts of `server_peers.py`: servers, loads, the reference they are compared with, and the table."""
