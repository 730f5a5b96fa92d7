"""`dodo pull`: a base model into the cache."""

import click

from dodo.cli.options import DEFAULT_MODEL, json_option
from dodo.cli.terminal import echo_json, reporter

__all__ = ["command"]


@click.command(
    epilog="""\b
Examples:
  dodo pull smollm2-135m
  DODO_HOME=/data/dodo dodo pull smollm2-135m
"""
)
@click.argument("alias", default=DEFAULT_MODEL)
@click.option("--force", is_flag=True, help="Fetch and convert again, even if it is there.")
@json_option
def command(alias: str, force: bool, as_json: bool) -> None:
    """Fetch the base model ALIAS (smollm2-135m unless named) into the cache, check it, convert it once, and print its folder.

    Verbs that need it do this by themselves on first use. The cache is $DODO_HOME, or 'dodo' in your cache folder.
    """
    from dodo.pull import BASES, is_pulled, pull

    if alias not in BASES:
        raise click.UsageError(f"ALIAS {alias}: can't be pulled; known are {', '.join(sorted(BASES))}")
    fetched = force or not is_pulled(alias)
    with reporter() as report:
        folder = pull(alias, force=force, progress=report)
    if as_json:
        echo_json({"alias": alias, "folder": str(folder), "fetched": fetched})
    else:
        click.echo(str(folder))
