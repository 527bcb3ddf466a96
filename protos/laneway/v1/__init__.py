"""Generated messages and services of the laneway.v1 protobuf package."""
