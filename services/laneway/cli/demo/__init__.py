"""`laneway demo`: a minute of real traffic through real parts, with a worker killed on purpose."""

from laneway.cli.demo.play import demo

__all__ = ["demo"]
