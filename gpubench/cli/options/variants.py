"""The options that have the same sweep measured in several ways, beside the library's own choice."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from gpubench.cli.options.choices import parse_choices, unknown_word
from gpubench.cli.plain_values import NCCL
from gpubench.cli.signature import completed, flag, option
from gpubench.errors import UsageError
from gpubench.model.terms.hierarchy import OPTION as HIERARCHICAL_OPTION
from gpubench.model.terms.nccl_choice import Algorithm, Protocol, settings_of

if TYPE_CHECKING:
    from gpubench.jobs.collective.plan import AskedVariants


@dataclass(frozen=True, kw_only=True)
class VariantOptions:
    """The algorithms and protocols to measure beside NCCL's own choice."""

    help_group: ClassVar = NCCL

    algo: list[str] | None = option(
        "ALGO",
        f"Have NCCL use {', '.join(Algorithm)}; several with commas, beside its own choice.",
        autocompletion=completed("algo"),
    )
    proto: list[str] | None = option(
        "PROTO",
        f"Have NCCL use {', '.join(Protocol)}; with --algo, every combination.",
        autocompletion=completed("proto"),
    )
    hierarchical: bool = flag(
        "Also as reduce-scatter in the node, all-reduce across nodes, all-gather in the node.", name=HIERARCHICAL_OPTION
    )

    def parse(self, backends: tuple[str, ...] = ()) -> "AskedVariants":
        """The variants, of every combination of algorithm and protocol; UsageError for a word that is not known."""
        from gpubench.jobs.collective.plan import AskedVariants

        algorithms = parse_choices("--algo", self.algo or (), Algorithm)
        protocols = parse_choices("--proto", self.proto or (), Protocol)
        return AskedVariants(
            tuple(settings_of(algorithms, protocols)), self.hierarchical, backends if len(backends) > 1 else ()
        )


def parse_backends(text: str | None) -> tuple[str, ...]:
    """The backends that a text with commas names, in the order of the registry; none where nobody chose.

    Raises UsageError: a word is none of them.
    """
    from gpubench.jobs.collective.plan import BACKENDS

    words = [] if text is None else [word.strip() for word in text.split(",")]
    for word in words:
        if word not in BACKENDS:
            raise unknown_word("--backend", word, BACKENDS)
    return tuple(name for name in BACKENDS if name in words)


def check_variants(variants: "AskedVariants", excluded: Mapping[str, bool]) -> None:
    """Raise UsageError where several ways are asked for together with an option that knows one."""
    for other in (name for name, is_given in excluded.items() if variants and is_given):
        raise UsageError(
            f"{variants.options[0]} with {other}",
            expected="one of them: a sweep over settings is measured, and by all ranks together",
            next_step=f"leave {other} out",
        )
