"""The promises of each part: functions that take the part's module and raise where one breaks."""


def expect(found, expected, what):
    """Raise with both values unless they are equal."""
    if found != expected:
        raise AssertionError(f"{what}: {found}, expected {expected}")
