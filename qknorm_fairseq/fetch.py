"""`qknorm fetch`: any corpus of the registry, by whatever reads its format."""

from __future__ import annotations

from pathlib import Path

from qknorm_fairseq import catalogues, iwslt15, published_text, ted
from qknorm_fairseq.corpora import Registry, load_registry
from qknorm_fairseq.errors import QKNormError

READERS: dict[str, published_text.Reader] = {"ted": ted, "iwslt15": iwslt15}


def fetch(
    name: str,
    pair: str | None,
    data_dir: Path,
    *,
    local: Path | None = None,
    mirror: str | None = None,
    registry: Registry | None = None,
    progress: bool = True,
) -> Path:
    """Build a corpus in data_dir/corpora/<name>/<pair> unless it is there; return that folder.

    Args:
        pair: "gl-en"; None for the one that the corpus has.
        local, mirror: as for :func:`qknorm_fairseq.published_text.fetch`.

    Raises:
        QKNormError: the corpus or the pair is unknown, or what those that build it raise.
    """
    registry = registry or load_registry()
    corpus = registry.corpus(name)
    if pair is None:
        pair, *others = corpus.pairs
        if others:
            raise QKNormError(f"{name} has several pairs; give --pair: {', '.join(corpus.pairs)}")
    if name == "catalogues":
        if local or mirror:
            raise QKNormError("catalogues come by pip: it takes PIP_FIND_LINKS and PIP_INDEX_URL")
        return catalogues.fetch(pair, data_dir, registry=registry, progress=progress)
    if name not in READERS:
        raise QKNormError(f"{registry.path}: {name}: nothing here knows the format of this corpus")
    return published_text.fetch(
        name,
        pair,
        data_dir,
        reader=READERS[name],
        local=local,
        mirror=mirror,
        registry=registry,
        progress=progress,
    )
