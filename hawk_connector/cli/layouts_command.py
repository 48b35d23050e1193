"""The `hawk layouts` command: the catalog, one layout as a diagram, and an index to its address and back."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import typer

from hawk_connector.errors import ConfigError, HawkError

from .output import console, refuse
from .plan_options import Pool

__all__ = ["Tensor", "layouts"]


class Tensor(str, Enum):
    """Which of a pool's two tensors: they have buffers of their own, and K's dims may be re-ordered."""

    k = "k"
    v = "v"


def layouts(
    name: Annotated[
        str, typer.Argument(help="A device or a layout of the catalog; the whole catalog without it.", show_default="")
    ] = "",
    model: Annotated[str, typer.Option(help="Shape of the cache: a name, or the path of a config.json.")] = (
        "llama-3.1-70b"
    ),
    chips: Annotated[int, typer.Option(min=1, max=1024, help="Chips over which the KV heads are split.")] = 4,
    pool: Annotated[
        Pool | None,
        typer.Option(help="Kind of pool. Default: cross_layer in banks, per_layer where memory is one region."),
    ] = None,
    block_size: Annotated[int, typer.Option(min=1, max=1 << 16, help="Tokens of a block.")] = 64,
    num_blocks: Annotated[int, typer.Option(min=1, max=1 << 24, help="Blocks of a pool.")] = 1024,
    codec: Annotated[str, typer.Option(help="float32, bfloat16, float16, bfp8, bfp4, bfp2. Default: the layout's.")] = (
        ""
    ),
    device: Annotated[str, typer.Option(help="The device whose banks it lies in.")] = "blackhole-p150",
    tensor: Annotated[Tensor, typer.Option("--kv", help="K's pool or V's.")] = Tensor.k,
    buffer_address: Annotated[
        str, typer.Option(help="Address of the pool, the same in every bank. Default: the device's first free one.")
    ] = "",
    index: Annotated[
        str,
        typer.Option(help="An element, as block=3,layer=1,head=0,token=5,dim=17 (what is left out is 0): its address."),
    ] = "",
    address: Annotated[str, typer.Option(help="A byte, as BANK:ADDRESS (5:0x123456): the element that has it.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print what --index or --address found as JSON.")] = False,
) -> None:
    """List known devices and KV layouts; show one; turn an index into (bank, address) and back.

    Exit code: 0; 2 where something named is unknown, does not fit the layout, or lies outside the pool.
    """
    from . import layouts_text
    from .layouts_pool import Element, ShownPool, parse_address, parse_index
    from .named_models import nearest

    try:
        if not name:
            if index or address:
                raise ConfigError("--index and --address need the NAME of a layout", fix="See `hawk layouts`.")
            layouts_text.catalog(console())
            return
        if layouts_text.is_device(name):
            if index or address:
                raise ConfigError(f"{name} is a device: indices belong to a layout", fix="See `hawk layouts`.")
            layouts_text.device(name, console())
            return
        if not layouts_text.is_layout(name):
            raise ConfigError(f"the catalog has no {name!r}", fix=nearest(name, layouts_text.names()))
        shown = ShownPool.of(
            name=name,
            model=model,
            chips=chips,
            pool=pool.value if pool is not None else None,
            block_size=block_size,
            num_blocks=num_blocks,
            codec=codec or None,
            device=device,
            kv=0 if tensor is Tensor.k else 1,
            buffer_address=buffer_address,
        )
        found: list[Element] = []
        if index:
            found.append(shown.element(parse_index(index)))
        if address:
            found.append(shown.element_at(*parse_address(address)))
    except HawkError as error:
        refuse(error)
    if not found:
        layouts_text.diagram(shown, console())
    for element in found:
        typer.echo(element.json() if as_json else element.text())
