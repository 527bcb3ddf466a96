"""The conformance kit: named cases that hold any engine to `engines/protocol.py`. `kit.run_kit` runs them."""
