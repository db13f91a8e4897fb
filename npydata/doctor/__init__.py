"""``npydata doctor``: what a training waits for, found from outside its script.

Hooks in the watched process (:mod:`npydata.doctor.inside`) and the kernel's counters (``sampling``)
give counters (``counters``); pure functions make findings of these (``judging``), and a page shows
them (``page``).
"""
