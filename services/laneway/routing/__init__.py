"""The routing service: which region a request should run in."""
