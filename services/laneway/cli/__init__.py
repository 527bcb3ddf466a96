"""The `laneway` command, and the local stack that it runs."""

import os

# The command starts processes while gRPC is at work; gRPC's own fork handlers then crash some of the children.
# Read by gRPC when it is first used.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
