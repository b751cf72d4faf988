"""OneEmbedding's options of tables: the initializers of a table and of its columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tf_dynemb.oneembedding.initializers import DEFAULT, check_initializer, keras_initializer


def make_table_options(param: Any) -> dict[str, Any]:
    """Returns the options of one table.

    Args:
        param: the initializer of its vectors, from a `make_..._initializer` function; or a list of
            the options of its columns, from `make_column_options`.

    Raises:
        TypeError, ValueError: `param` is neither.
    """
    if isinstance(param, Mapping):
        return {"initializer": check_initializer(param, "param")}
    if isinstance(param, (list, tuple)):
        return {"columns": _check_columns(param, "param")}
    raise TypeError(
        "param must be an initializer or a list of the options of columns "
        f"(make_column_options), got {param!r}."
    )


make_table = make_table_options


def make_column_options(initializer: Any) -> dict[str, Any]:
    """Returns the options of one column of a table: a range of the elements of its vectors.

    Args:
        initializer: the initializer of these elements, from a `make_..._initializer` function.

    Raises:
        TypeError, ValueError: `initializer` is none.
    """
    return {"initializer": check_initializer(initializer)}


def check_tables(tables: Any, column_dims: Sequence[int], default: Any) -> list[dict[str, Any]]:
    """Returns the options of all tables as a list of {"columns": [{"initializer": ...}, ...]}.

    Args:
        tables: what a user passes: options of tables, made by `make_table_options` or by hand; or
            None, for one table.
        column_dims: the widths of the columns of all tables.
        default: the initializer of the table if `tables` is None; None: N(0, 0.05).

    Raises:
        TypeError, ValueError: an argument is invalid; the message names it.
    """
    if default is not None:
        default = check_initializer(default, "default_initializer")
    if tables is None:
        tables = [{"initializer": default or DEFAULT}]
    if not isinstance(tables, (list, tuple)):
        raise TypeError(
            f"tables must be a list with the options of each table, or None, got {tables!r}."
        )
    if not tables:
        raise ValueError("tables is empty: at least one table is needed; None means one table.")
    return [
        {"columns": _columns_of(table, column_dims, f"tables[{i}]")}
        for i, table in enumerate(tables)
    ]


def initializer_of(table: Mapping[str, Any], column_dims: Sequence[int]) -> Any:
    """Returns the initializer of a checked table: one, or one for each element of a vector."""
    columns = [keras_initializer(column["initializer"]) for column in table["columns"]]
    if len(columns) == 1:
        return columns[0]
    return [column for column, dim in zip(columns, column_dims, strict=True) for _ in range(dim)]


def _columns_of(table: Any, column_dims: Sequence[int], what: str) -> list[dict[str, Any]]:
    if not isinstance(table, Mapping) or set(table) not in ({"initializer"}, {"columns"}):
        raise TypeError(f"{what} must be the result of make_table_options, got {table!r}.")
    if "initializer" in table:
        initializer = check_initializer(table["initializer"], f"the initializer of {what}")
        return [{"initializer": dict(initializer)} for _ in column_dims]
    columns = _check_columns(table["columns"], what)
    if len(columns) != len(column_dims):
        raise ValueError(
            f"{what} has {len(columns)} columns, but embedding_dim has {len(column_dims)}: "
            f"{list(column_dims)}."
        )
    return columns


def _check_columns(columns: Any, what: str) -> list[dict[str, Any]]:
    if not isinstance(columns, (list, tuple)) or not columns:
        raise ValueError(f"the columns of {what} must be a list with one or more, got {columns!r}.")
    for i, column in enumerate(columns):
        if not isinstance(column, Mapping) or set(column) != {"initializer"}:
            raise TypeError(
                f"column {i} of {what} must be the result of make_column_options, got {column!r}."
            )
    return [
        {"initializer": check_initializer(column["initializer"], f"column {i} of {what}")}
        for i, column in enumerate(columns)
    ]
