"""What WeSpeaker's trainer gets wrong in silence, told or stopped.

Its data pipeline swallows the reason why a file cannot be used, and goes on for ever where none can
be; its large-margin stage says that it does not perturb speed, and does.
"""

import functools
import logging
import os
import sys
from collections.abc import Collection, Iterator

from wespeaker_qmargin.adapter import scale_warning, wespeaker_module
from wespeaker_qmargin.checkout import Script

logger = logging.getLogger(__name__)

FIXES = ("lm-speed",)
# processors that leave out what they cannot use -> why, where they log no reason
_PROCESSORS = {
    "url_opener": "",
    "tar_file_and_group": "no utterance in it",
    "parse_raw": "",
    "parse_feat": "",
    "filter": "shorter than dataset_args.filter_args.min_num_frames",
}
_READ_THE_LIST = ("url_opener", "parse_raw", "parse_feat")
_NUM_REASONS = 3


def watch(script: Script, *, fixes: Collection[str] = ()) -> None:
    """Tell and stop what would go wrong in silence in ``script``, a program of WeSpeaker's.

    ``fixes``: ``lm-speed`` makes the large-margin stage keep its word.

    Raises:
        ValueError: an unknown fix.
    """
    for name in fixes:
        if name not in FIXES:
            raise ValueError(f"--fix {name}: expected {', '.join(FIXES)}")
    if "dataset.processor" in script.modules:
        _watch_processors()
    if "utils.utils" in script.modules:
        _watch_config(trains="do_lm" in script.text, fix_speed="lm-speed" in fixes)


def _watch_processors() -> None:
    processor = wespeaker_module("dataset.processor")
    state = _Pipeline(processor.__file__)
    logging.getLogger().addFilter(state)
    for name, reason in _PROCESSORS.items():
        setattr(processor, name, _watched(getattr(processor, name), reason, state))


class _Pipeline(logging.Filter):
    """Where the pipeline of this process is in its list, and the last reason that it swallowed.

    As a filter of the root logger it adds to each of the pipeline's warnings the exception that is
    being handled; the warning itself does not name it.
    """

    def __init__(self, file: str):
        super().__init__()
        self._file, self.last_reason = file, ""
        self.begin()

    def begin(self) -> None:
        self.num_passes, self.one_worker, self._first = 0, True, None

    def filter(self, record: logging.LogRecord) -> bool:
        error = sys.exc_info()[1]
        if error is not None and record.pathname == self._file:
            self.last_reason = f"{record.getMessage()} ({type(error).__name__}: {error})"
            record.msg, record.args = "%s", (self.last_reason,)
        return True

    def read(self, sample: dict) -> None:
        """Count the passes: the list holds one text object an entry, repeated in one order."""
        self.one_worker = sample.get("num_workers", 1) == 1
        if self._first is None:
            self._first = sample["src"]
        elif sample["src"] is self._first:
            self.num_passes += 1


def _watched(processor, reason: str, state: _Pipeline):
    """``processor``, but raising ValueError when nothing of a whole pass over its list comes out.

    A list that ends (extraction) is only told where other workers may have had more of it.
    """

    @functools.wraps(processor)
    def watched(data, *args, **options):
        failed: dict[str, str] = {}
        last_good, name = -1, None

        def keep_reason() -> None:
            if name is not None:
                failed[name] = state.last_reason or f"{name}: {reason}"

        def taken() -> Iterator[dict]:
            nonlocal name
            for sample in data:
                keep_reason()
                if processor.__name__ in _READ_THE_LIST:
                    state.read(sample)
                if state.num_passes > last_good + 1:
                    raise _nothing_left(failed)
                name, state.last_reason = str(sample.get("key", sample.get("src"))), ""
                yield sample

        if processor.__name__ in _READ_THE_LIST:
            state.begin()
        for sample in processor(taken(), *args, **options):
            failed.clear()
            last_good, name = state.num_passes, None
            yield sample
        keep_reason()
        if failed and last_good < 0:
            if state.one_worker:
                raise _nothing_left(failed)
            logger.warning("%s", _nothing_left(failed))

    return watched


def _nothing_left(failed: dict[str, str]) -> ValueError:
    return ValueError(
        f"none of this worker's {len(failed)} entries of the list could be used: "
        + "; ".join(list(failed.values())[:_NUM_REASONS])
        + ("; ..." if len(failed) > _NUM_REASONS else "")
    )


def _watch_config(*, trains: bool, fix_speed: bool) -> None:
    utils = wespeaker_module("utils.utils")
    theirs = utils.parse_config_or_kwargs
    lm_args: list[dict] = []
    if trains and fix_speed:
        _keep_speed(lm_args)

    @functools.wraps(theirs)
    def parse_config_or_kwargs(config_file, **options):
        try:
            configs = theirs(config_file, **options)
        except (AttributeError, TypeError) as error:
            raise ValueError(f"{config_file}: expected a YAML mapping of keys to values") from error
        is_first = os.environ.get("RANK", "0") == "0"
        for warning in (_scale_warning(configs), _expert_warning(configs)):
            if trains and is_first and warning:
                logger.warning("%s", warning)
        if trains and _perturbs_in_silence(configs):
            lm_args.append(configs["dataset_args"])
            if not fix_speed and is_first:
                logger.warning(
                    "do_lm: WeSpeaker's log and saved config will say that this stage does not "
                    "perturb speed, but it does (train.py:91 makes the data set first); "
                    "`--fix lm-speed` makes it keep its word, with other results than WeSpeaker's"
                )
        return configs

    utils.parse_config_or_kwargs = parse_config_or_kwargs


def _scale_warning(configs: dict) -> str | None:
    """What a scale left from CosFace means, where somebody changed ``project_type`` alone."""
    args = configs.get("projection_args", {})
    scale = args.get("scale", "auto")
    if args.get("project_type") != "q_margin" or scale == "auto":
        return None
    margin = configs.get("margin_update", {}).get("final_margin", 0.0)
    return scale_warning(float(args.get("alpha", 1.5)), float(scale), float(margin))


def _expert_warning(configs: dict) -> str | None:
    """What its trainer leaves out, where a front-end has experts."""
    args = configs.get("dataset_args", {})
    if not (args.get(f"{args.get('frontend')}_args") or {}).get("moe"):
        return None
    return (
        "moe: WeSpeaker's trainer takes the loss of the head alone, without the z and balance "
        "losses of the routers; `wespeaker-qmargin train` adds them"
    )


def _perturbs_in_silence(configs: dict) -> bool:
    perturbs = configs.get("dataset_args", {}).get("speed_perturb", False)
    return bool(configs.get("do_lm") and configs.get("data_type") != "feat" and perturbs)


def _keep_speed(lm_args: list[dict]) -> None:
    """Make data sets of these arguments without speed perturbation; the head keeps its classes."""
    dataset = wespeaker_module("dataset.dataset")
    theirs = dataset.Dataset

    @functools.wraps(theirs)
    def Dataset(data_type, data_list_file, configs, *args, **options):
        if any(configs is known for known in lm_args):
            configs = {**configs, "speed_perturb": False}
        return theirs(data_type, data_list_file, configs, *args, **options)

    dataset.Dataset = Dataset
