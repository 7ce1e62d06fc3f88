"""The committed lists of the fields that transformers reads, against the installed transformers' own code."""

import ast
import dataclasses
import importlib
import inspect
import textwrap

import pytest
from transformers import CONFIG_MAPPING, PreTrainedConfig, cache_utils, masking_utils, modeling_rope_utils

from icejax.checks.errors import InputError
from icejax.models.hf.hf_config import IRRELEVANT
from icejax.models.hf.reference_fields import BY_FAMILY, EVERYWHERE
from icejax.models.registry import FAMILIES, Family
from tests.helpers import raw_configs

TEXT_MODELS = [name for name, family in FAMILIES.items() if isinstance(family, Family)]
THEIRS = {"kimi_k2": "deepseek_v3"}  # transformers has no kimi_k2: its weights run there as deepseek_v3
CONFIGS = {"config", "layer_config", "effective_config"}  # names of a config in transformers' code
TOWERS = ("Vision", "Audio", "Image", "Projector", "Multimodal", "ConditionalGeneration", "Classification")


def code(piece) -> ast.AST:
    """Returns the syntax tree of a module, a class or a function."""
    return ast.parse(textwrap.dedent(inspect.getsource(piece)))


def is_named(node: ast.AST, names: set[str]) -> bool:
    """Says whether an expression is a name, or an attribute, in `names`."""
    return (node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else None) in names


def attributes(tree: ast.AST, receivers: set[str]) -> set[str]:
    """Returns each x of `config.x`, `self.config.x` and `getattr(config, "x")` in a piece of code."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and is_named(node.func, {"getattr", "hasattr"})]
    return {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and is_named(node.value, receivers)} | {
        call.args[1].value for call in calls if is_named(call.args[0], receivers) and isinstance(call.args[1], ast.Constant)
    }


def by_keyword(config_class: type) -> set[str]:
    """Returns each x of `kwargs.pop("x")` where a config class reads its fields."""
    calls = []
    for name in ("__post_init__", "convert_rope_params_to_dict"):
        if hasattr(config_class, name):
            calls += [node for node in ast.walk(code(getattr(config_class, name))) if isinstance(node, ast.Call) and node.args]
    keyed = [call for call in calls if isinstance(call.func, ast.Attribute) and is_named(call.func.value, {"kwargs"})]
    return {call.args[0].value for call in keyed if isinstance(call.args[0], ast.Constant)}


def config_fields(config_class: type, read: set[str]) -> set[str]:
    """Returns the fields of a config class, and which names of `read` are neither a method nor a constant of the class."""
    declared = {field.name for field in dataclasses.fields(config_class)} | set(config_class.attribute_map)
    names = declared | by_keyword(config_class) | (read - set(dir(config_class)))
    return {name for name in names if not name.startswith("_")}


def read_everywhere() -> set[str]:
    """Returns the fields that transformers reads for every family."""
    read = attributes(code(modeling_rope_utils.RotaryEmbeddingConfigMixin), {"self"})
    for module in (masking_utils, cache_utils):
        read |= attributes(code(module), CONFIGS)
    return config_fields(PreTrainedConfig, read)


def read_for(model_type: str) -> set[str]:
    """Returns the fields that transformers' config and modelling code of a family reads."""
    config_class = CONFIG_MAPPING[THEIRS.get(model_type, model_type)]
    read = attributes(code(config_class), {"self"})
    modelling = importlib.import_module(config_class.__module__.replace(".configuration_", ".modeling_"))
    nodes = [node for node in code(modelling).body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    # Gemma3Model holds towers and Gemma3TextModel: its config is the outer one.
    whole = {node.name.replace("TextModel", "Model") for node in nodes if node.name.endswith("TextModel")}
    for node in nodes:
        if node.name not in whole and not any(word in node.name for word in TOWERS):
            read |= attributes(node, CONFIGS)
    return config_fields(config_class, read)


@pytest.mark.slow
def test_transformers_reads_the_fields_that_are_listed():
    """A new transformers may read more: read the field in the family's file or refuse it, then list it."""
    assert read_everywhere() == EVERYWHERE
    assert {name: read_for(name) - EVERYWHERE for name in TEXT_MODELS} == BY_FAMILY


STRANGE = {"no": "such value"}  # a value that no field of a family may have
# Latent attention computes head_dim from its parts; a rope by layer type has its own original context.
LATENT, BY_TYPE = {"head_dim"}, {"original_max_position_embeddings"}
UNREAD = dict.fromkeys(("mistral4", "deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe_lite"), LATENT)
UNREAD |= dict.fromkeys(("gemma3_text", "gemma4_text", "olmo3"), BY_TYPE)
NAMED = {"rope_local_base_freq": "rope_theta"}  # the theta of a rope by layer type


@pytest.mark.parametrize("model_type", BY_FAMILY)
def test_a_field_that_transformers_reads_is_read_or_refused(model_type, subtests):
    smallest = raw_configs.SMALLEST[model_type] | {"model_type": model_type}
    raw_configs.read(**smallest)
    for name in sorted((EVERYWHERE | BY_FAMILY[model_type]) - IRRELEVANT - UNREAD.get(model_type, set())):
        with subtests.test(name), pytest.raises(InputError, match=NAMED.get(name, name)):
            raw_configs.read(**smallest | {name: STRANGE})


def test_irrelevant_fields_are_fields_that_transformers_reads():
    assert not IRRELEVANT - EVERYWHERE.union(*BY_FAMILY.values())
