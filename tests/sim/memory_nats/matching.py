"""Which subjects a pattern takes."""


def matches(pattern: str, subject: str) -> bool:
    if pattern in (subject, ">"):
        return True
    if "*" not in pattern and not pattern.endswith(">"):
        return False
    tokens = subject.split(".")
    wanted = pattern.split(".")
    for i, token in enumerate(wanted):
        if token == ">":
            return len(tokens) > i
        if i >= len(tokens) or token not in ("*", tokens[i]):
            return False
    return len(wanted) == len(tokens)


def literal(pattern: str) -> bool:
    return "*" not in pattern and not pattern.endswith(">")
