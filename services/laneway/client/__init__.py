"""What callers import: a typed client with deadlines, cancellation and a retry budget."""
