"""Rules about checkpoints: what saving costs, what it costs afterwards, and what it risks."""

from collections.abc import Sequence

from npydata.doctor.counters import Counters, Save
from npydata.doctor.data_waits import evicted_s
from npydata.doctor.finding import Finding, is_noticeable, ms, share_of
from npydata.system.progress import human_bytes, human_rate

OURS = "AsyncCheckpointer"
WHOLE = "save(folder, model.state_dict(), optimizer.state_dict(), TrainingState(...))"
SAVE_NOTICEABLE = 0.02
"""Saves are told of earlier: they grow with the model, and can cost nothing."""


def save_stall(c: Counters) -> Finding | None:
    """A loop that stands still while it saves."""
    if not c.saves or not is_noticeable(c, c.save_s, SAVE_NOTICEABLE):
        return None
    longest = max(c.saves, key=lambda save: save.stall_s)
    count, nbytes = len(c.saves), sum(save.bytes for save in c.saves)
    each = f"{count} saves by {longest.kind}, the loop stands still {ms(c.save_s, count)} each"
    if nbytes:
        each += (
            f" for {human_bytes(nbytes // count)} ({human_rate(nbytes / max(c.save_s, 1e-9), 'B')})"
        )
    in_dcp = longest.kind.startswith("dcp.")
    title = f"{longest.kind} stops the training"
    return Finding(
        "dcp_stall" if in_dcp else "save_stall",
        title,
        c.save_s,
        share_of(c, c.save_s),
        [each],
        cheaper_save(longest.kind, uses_ours(c)),
        longest.where,
    )


def uses_ours(c: Counters) -> bool:
    """Whether some saves are by npydata's checkpointer."""
    return any(save.kind.startswith(OURS) for save in c.saves)


def cheaper_save(kind: str, with_ours: bool) -> str:
    """Return what to do about saves by a function; ours already write behind the training."""
    if kind.startswith(OURS):
        return (
            "prepare(model.state_dict(), optimizer.state_dict()) before the loop makes the "
            'first fast; AsyncCheckpointer(snapshot="overlap") with protect(optimizer) copies in '
            "forward and backward; or save less often, as one save waits for the one before"
        )
    if with_ours:
        return "give this to the AsyncCheckpointer too, which writes behind the training: " + WHOLE
    name = "save_distributed" if kind.startswith("dcp.") else "save"
    return (
        f"copy, and write behind the training: npydata.AsyncCheckpointer().{name}"
        "(folder, model.state_dict(), ...)"
    )


def evicted(c: Counters) -> Finding | None:
    """Saves that push the training's files out of the page cache."""
    loss = evicted_s(c)
    if not is_noticeable(c, loss):
        return None
    waits = (
        f"a batch takes {ms(c.after_wait_s, c.after_n)} soon after a save, "
        f"otherwise {ms(c.else_wait_s, c.else_n)}"
    )
    reads = (
        f"{human_bytes(c.after_read_bytes)} read and {c.after_faults:,} major page faults in "
        f"{c.after_n} batches after saves; in {c.else_n} others "
        f"{human_bytes(c.else_read_bytes)} and {c.else_faults:,}"
    )
    others = [save for save in c.saves if not save.kind.startswith(OURS)]
    if not others:
        change = (
            "AsyncCheckpointer writes past the page cache where the file system has direct I/O "
            "(tmpfs and some network ones have not): save to another disk; or leave memory free "
            "for its copy of the state, which takes as much as the checkpoint"
        )
    elif uses_ours(c):
        change = (
            f"give this to the AsyncCheckpointer too, which writes past the page cache: {WHOLE}"
        )
    else:
        change = (
            "write past the page cache: npydata.AsyncCheckpointer does (direct I/O); or "
            "os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED) on the checkpoint, once synced"
        )
    return Finding(
        "page_cache",
        "Saves push the data out of the page cache",
        loss,
        share_of(c, loss),
        [waits, reads],
        change,
        max(others or c.saves, key=lambda save: save.bytes).where,
    )


def torn_save(c: Counters) -> Finding | None:
    """Checkpoints that a kill or a power cut can spoil while the one before is gone."""
    over = [save for save in c.saves if save.over and not save.renamed]
    early = [save for save in c.saves if save.renamed and (not save.synced or save.synced_late)]
    loose = [save for save in c.saves if save.path and not save.synced and not save.renamed]
    if over:
        return risk(
            c,
            over,
            "torn_save",
            "Saves go straight over the last checkpoint",
            "is emptied first: killed meanwhile, neither the old nor the new is there",
        )
    if early:
        return risk(
            c,
            early,
            "rename_unsynced",
            "Checkpoints are renamed before they are on disk",
            "got its name without fsync before: after a power cut it may be empty",
        )
    if loose:
        return risk(
            c,
            loose,
            "unsynced_save",
            "Checkpoints are not flushed to the disk",
            "was never synced: after a power cut it may be cut off or empty",
        )
    return None


def risk(c: Counters, saves: Sequence[Save], cause: str, title: str, why: str) -> Finding:
    """Return the finding that some saves are not safe."""
    newest = saves[-1]
    said = [f"{len(saves)} of {len(c.saves)} saves", f"{newest.path} {why}"]
    whole = "npydata.AsyncCheckpointer().save(folder, ...) does"
    if uses_ours(c):
        whole = "or give this to the AsyncCheckpointer too, which does: " + WHOLE
    change = (
        "write to a new name beside it, os.fsync(file), os.replace(new, name), fsync the "
        f"folder; {whole}"
    )
    lost = c.run_s if cause == "torn_save" else c.run_s / max(len(c.saves), 1)
    return Finding(cause, title, lost, share_of(c, lost), said, change, newest.where, risk=True)
