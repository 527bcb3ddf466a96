"""The policy under virtual time: traces, engines by their steps, Laneway and its rivals, and what came of each."""
