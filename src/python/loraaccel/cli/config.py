"""`loraaccel config`: where the installed headers, libraries and CMake files are."""

from __future__ import annotations

import click


@click.command(
    epilog="Example:  cmake -S . -B build -DCMAKE_PREFIX_PATH=$(loraaccel config --cmake-prefix-path)"
)
@click.option(
    "--cmake-prefix-path",
    is_flag=True,
    help="Directory for CMAKE_PREFIX_PATH; find_package(loraaccel) works then.",
)
@click.option("--pkg-config-path", is_flag=True, help="Directory for PKG_CONFIG_PATH.")
@click.option("--include-dir", is_flag=True, help="Directory of the C++ headers.")
@click.option("--lib-dir", is_flag=True, help="Directory of the libraries.")
@click.option("--version", "show_version", is_flag=True, help="Version of the package.")
@click.option("--json", "as_json", is_flag=True, help="All of them as one JSON object.")
def config(
    cmake_prefix_path: bool,
    pkg_config_path: bool,
    include_dir: bool,
    lib_dir: bool,
    show_version: bool,
    as_json: bool,
) -> None:
    """Print paths of the installed package for compilers and CMake, one a line, in the order of the options."""
    import json
    from importlib.resources import files

    from loraaccel import __version__

    root = str(files("loraaccel"))
    values = {
        "cmake_prefix_path": (cmake_prefix_path, root),
        "pkg_config_path": (pkg_config_path, f"{root}/lib/pkgconfig"),
        "include_dir": (include_dir, f"{root}/include"),
        "lib_dir": (lib_dir, f"{root}/lib"),
        "version": (show_version, __version__),
    }
    if as_json:
        click.echo(json.dumps({name: value for name, (_, value) in values.items()}))
        return
    chosen = [value for wanted, value in values.values() if wanted]
    if not chosen:
        raise click.UsageError("name at least one of the options, see --help")
    for value in chosen:
        click.echo(value)
