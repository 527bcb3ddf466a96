"""What every service shares at its edge: settings, logs, metrics, lifecycle, NATS lanes, gRPC, wire conversion."""
