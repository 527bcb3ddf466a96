"""Values and rules that every part of Laneway shares. Pure: no I/O, no clock, no randomness, no protobuf."""
