"""The only place that knows both core values and protobuf messages."""
