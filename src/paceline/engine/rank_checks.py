"""Checks that all ranks have the same recipe, extension code, data and model."""

from torch import nn

from paceline.config import import_files
from paceline.config.io import leaves, to_tree
from paceline.config.recipe import Recipe
from paceline.data.load.source import DataSource
from paceline.distributed.world import World
from paceline.engine.resume import experiment
from paceline.errors import UserError

_MAX_LISTED = 8  # ranks in a message


def check_same_recipe(recipe: Recipe, world: World) -> None:
    """Refuse different recipes on different ranks, which happen when nodes are started by hand."""
    trees = [dict(leaves(experiment(tree))) for tree in world.all_gather_object(to_tree(recipe))]
    for rank, tree in enumerate(trees):
        if differing := sorted(key for key in trees[0].keys() | tree.keys() if trees[0].get(key) != tree.get(key)):
            values = "; ".join(
                f"{key} is {trees[0].get(key)!r} on rank 0, {tree.get(key)!r} on rank {rank}" for key in differing
            )
            raise UserError(
                "rank-recipe-mismatch",
                f"rank {rank} was started with a different recipe than rank 0: {values}. Use the same options on all "
                "nodes.",
                rank=rank,
                keys=differing,
            )


def check_same_imports(recipe: Recipe, world: World) -> None:
    """Refuse different extension code on different ranks, which happens when nodes hold different copies of it."""
    sources = import_files.sources(recipe.imports)
    found = world.all_gather_object({name: source["sha256"] for name, source in sources.items()})
    ranks = [rank for rank, other in enumerate(found) if other != found[0]]
    if not ranks:
        return
    # only now, because the hashes of all files on all ranks may be large
    files, hosts = world.all_gather_object(import_files.file_hashes(recipe.imports)), world.hosts()
    first, other = found[0], found[ranks[0]]
    module = min(name for name in first.keys() | other.keys() if first.get(name) != other.get(name))
    others = ", ".join(f"rank {rank} ({hosts[rank]})" for rank in ranks[:_MAX_LISTED])
    differing = import_files.changed_files(files[0], files[ranks[0]]) or "not all of them import it"
    raise UserError(
        "rank-imports-mismatch",
        f"the imported module {module} is not the same on rank 0 ({hosts[0]}) and {others}"
        f"{' ...' * (len(ranks) > _MAX_LISTED)}: {differing}. Use the same --import options and install the same "
        "version of the module on every node, or start the nodes with `paceline launch`, which copies it.",
        module=module,
        ranks=ranks,
        hosts=[hosts[rank] for rank in ranks],
    )


def check_same_model(model: nn.Module, world: World) -> None:
    """Refuse models of different shapes, e.g. with random widths, because rank 0 sends its weights to all ranks."""
    shapes = {name: f"{tensor.dtype} {tuple(tensor.shape)}" for name, tensor in model.state_dict().items()}
    for rank, found in enumerate(world.all_gather_object(shapes)):
        if differing := [name for name in shapes.keys() | found.keys() if shapes.get(name) != found.get(name)]:
            raise UserError(
                "rank-model-mismatch",
                f"the models of ranks {world.rank} and {rank} have different shapes: {min(differing)}. Create the same "
                "model on all ranks.",
                rank=rank,
            )


def check_same_data(source: DataSource, world: World) -> None:
    """Refuse different data on different ranks, which happens when nodes hold different data at the same path."""
    prints = world.all_gather_object(source.fingerprint)
    for rank, found in enumerate(prints):
        if found != prints[0]:
            raise UserError(
                "rank-data-mismatch",
                f"rank {rank} reads different data than rank 0 (fingerprint {found} instead of {prints[0]}). "
                "Copy the same data to every node. A registered dataset must return the same items in every process.",
                rank=rank,
            )
