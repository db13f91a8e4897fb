"""Charts and tables that several lessons share."""

from course.play import cells


def compare(before, after=None):
    """Print what was measured at the beginning of a lesson, and beside it what it is now."""
    for what, value in before.items():
        print(f"{what:<48}{value}" + (f" -> {after[what]}" if after else ""))


def axes(height, title, **looks):
    """Return a figure of the page's width, and its axes."""
    figure = cells.new_figure(8, height)
    ax = figure.subplots()
    ax.set_title(title, loc="left", fontweight="bold", fontsize=11)
    ax.set(**looks)
    ax.spines[["top", "right"]].set_visible(False)
    return figure, ax


def bars(rows, colours, title, unit):
    """Return a group of bars for each row: one for each name in `colours`."""
    figure, ax = axes(0.9 + 0.5 * len(rows), title, xlabel=unit)
    height = 0.8 / len(colours)
    for k, (name, colour) in enumerate(colours.items()):
        places = [y + (k - (len(colours) - 1) / 2) * height for y in range(len(rows))]
        values = [row[name] for row in rows.values()]
        drawn = ax.barh(places, values, 0.9 * height, color=colour, label=name)
        ax.bar_label(drawn, fmt="{:.0f}", padding=3)
    name_rows(ax, rows)
    return figure


def strips(rows, colours, title, unit):
    """Return a lane of strips for each row.

    A strip is where it begins and ends, its kind, and perhaps a number, shown where there is room.
    """
    figure, ax = axes(1.2 + 0.32 * len(rows), title, xlabel=unit)
    room = 0.012 * max(end for row in rows.values() for _, end, *_ in row)
    for y, row in enumerate(rows.values()):
        for begin, end, kind, *number in row:
            fill = colours[kind]
            ax.barh(y, end - begin, left=begin, color=fill, ec="#6b7280", label=kind)
            if number and end - begin > room * len(str(*number)):
                ink = cells.ink_on(fill)
                cells.write(ax, (begin + end) / 2, y, *number, ha="center", color=ink, fontsize=9)
    name_rows(ax, rows)
    return figure


def name_rows(ax, rows):
    """Write the rows' names to their left, the first on top, and below what the colours mean."""
    ax.set_yticks(range(len(rows)), list(rows))
    ax.invert_yaxis()
    patches, names = ax.get_legend_handles_labels()
    kinds = dict(zip(names, patches, strict=True))
    if len(kinds) > 1:
        ax.figure.legend(kinds.values(), kinds, loc="outside lower left", ncols=6, frameon=False)
