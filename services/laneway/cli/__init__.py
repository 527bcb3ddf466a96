"""The `laneway` command and the local stack."""
