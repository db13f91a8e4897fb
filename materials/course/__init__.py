"""The course's machinery: what lessons call, how answers are judged, how notebooks are built."""
