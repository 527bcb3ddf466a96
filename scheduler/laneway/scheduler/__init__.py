"""The scheduling service: its loop and its gRPC edge."""
