"""Grid positions as text. Cells are numbered row by row, `columns` a row."""

from collections.abc import Iterable

ARRIVED = "√"  # the player at the goal, where that ends the episode


def rows_of(cells: str, columns: int) -> list[str]:
    """Split the glyphs of a grid into rows."""
    return [cells[start : start + columns] for start in range(0, len(cells), columns)]


def neighbours(size: int, moves: Iterable[tuple[int, int]]) -> list[list[int | None]]:
    """For each cell of a square the cell in each direction, None beyond the edge."""
    inside = {(n // size, n % size): n for n in range(size**2)}
    return [
        [inside.get((row + down, column + right)) for down, right in moves]
        for row, column in inside
    ]


def place(cell: int, columns: int) -> str:
    """Write a cell's position: `row 1 column 2`."""
    row, column = divmod(cell, columns)
    return f"row {row} column {column}"


def bearing(here: int, there: int, columns: int) -> str:
    """Write the offset from one cell to another: `up 1 right 2`."""
    down = there // columns - here // columns
    right = there % columns - here % columns
    vertical, horizontal = "up" if down < 0 else "down", "left" if right < 0 else "right"
    return f"{vertical} {abs(down)} {horizontal} {abs(right)}"
