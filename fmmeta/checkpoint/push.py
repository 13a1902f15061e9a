"""`fmmeta push`: uploads an exported model to the Hugging Face Hub.

    run or model folder --> list of files with sizes --> create_repo, create_commit

Only safetensors, configurations, cards and tokenizer files are uploaded: exactly those that were listed. The
card on the hub names the repository in its commands and in its model-index; the folder itself stays as it is.
"""

from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

import huggingface_hub
from huggingface_hub import ModelCard
from huggingface_hub.utils import filter_repo_objects, validate_repo_id
from tqdm import tqdm

from fmmeta.checkpoint.model_card import FILE, PLACEHOLDER, is_hub_id
from fmmeta.checkpoint.read import MANIFEST
from fmmeta.common.errors import UsageError, usage_errors
from fmmeta.common.security import inside, printable
from fmmeta.config.fields import refuse_first, setting
from fmmeta.learners.files import ADAPTER_FILE, read_json

SENT = ["*.safetensors", "*.json", "*.txt", "*.md", "*.jinja", "*.model", "*.bpe.codes", "*.vocab"]
LEFT_OUT = {
    "predictions.jsonl": "texts of the query set",
    "merged/*": "another model; push it by its folder",
    "*.trials.json": "of an unfinished fmmeta tune or evaluate",
    "*.finished.json": "of an unfinished fmmeta tune or evaluate",
    ".*": "hidden",
    "*/.*": "hidden",
}
"""What commands write beside a model, and why it is not uploaded."""


@dataclass
class PushConfig:
    """A folder and a repository."""

    repo_id: str = setting("", "Repository on the hub, USER/NAME; created if it does not exist")
    folder: str = setting(
        ".", "Folder of a finished run, whose model/ is uploaded, or of an exported or adapted model"
    )
    private: bool = setting(False, "Create the repository as a private one; an existing one stays as it is")
    revision: str | None = setting(
        None, "Branch that gets the commit, created if it does not exist (default: main)"
    )
    dry_run: bool = setting(False, "List the files and upload nothing; needs no token and no network")


def run(settings: PushConfig) -> None:
    """List the files and upload them. Raises `UsageError` in one line."""
    check_repo_id(settings.repo_id)
    folder = model_folder(Path(settings.folder))
    files, left_out = choose_files(folder)
    card = pushed_card(folder, settings.repo_id)
    sizes = {name: (folder / name).stat().st_size for name in files}
    print(
        f"{folder}: {len(files)} files, {tqdm.format_sizeof(sum(sizes.values()), 'B')}, to {settings.repo_id}"
    )
    for name, size in sizes.items():
        print(f"  {tqdm.format_sizeof(size, 'B'):>9}  {printable(name)}")
    for name, why in left_out.items():
        print(f"  left out: {printable(name)} ({why})")
    if settings.dry_run:
        return
    given = f"repo_id={settings.repo_id}"
    if not (token := huggingface_hub.get_token()):
        raise UsageError(f"{given} needs a token of the hub; set HF_TOKEN, or run `hf auth login`")
    api = huggingface_hub.HfApi(token=token)
    fix = "check the network, the token (`hf auth login`, with write access), repo_id and revision; try again"
    with usage_errors(f"{given}: the upload failed", fix):
        api.create_repo(settings.repo_id, private=settings.private or None, exist_ok=True)
        branch = settings.revision or "main"
        if branch != "main" and not branch.startswith("refs/"):
            api.create_branch(settings.repo_id, branch=branch, exist_ok=True)
        done = api.create_commit(
            settings.repo_id,
            [
                huggingface_hub.CommitOperationAdd(name, card if card and name == FILE else folder / name)
                for name in files
            ],
            commit_message="Upload a model of fmmeta",
            revision=settings.revision,
        )
    print(f"uploaded: {done.commit_url}")


def check_repo_id(repo_id: str) -> None:
    """Raise `UsageError` if this is not USER/NAME."""
    refuse_first([(not repo_id, "repo_id is missing; give --repo_id USER/NAME")])
    form = "give USER/NAME of letters, digits, -, _ and . (no -- or ..)"
    with usage_errors(f"repo_id={repo_id} is no name of a repository", form):
        validate_repo_id(repo_id)
    refuse_first([(repo_id.count("/") != 1, f"repo_id={repo_id} names no user or organisation; {form}")])


def model_folder(folder: Path) -> Path:
    """The folder of the model: `folder`, or model/ of a finished run. Raises `UsageError`."""
    given = f"folder={folder}"
    refuse_first(
        [
            (not folder.is_dir(), f"{given} is no folder; give that of a run or of a model"),
            (
                (folder / MANIFEST).exists(),
                f"{given} is a checkpoint and no model; give the folder of the run, or its model/",
            ),
        ]
    )
    if (folder / "run.json").is_file():
        if (read_json(str(folder.resolve()), "run.json", dict) or {}).get("finished") is not True:
            raise UsageError(
                f"{given} holds a run that is not finished; resume it by the same command, then push"
            )
        folder = inside(folder, folder / "model")
    adapter = (folder / "adapter_config.json").is_file()
    weights = (folder / ADAPTER_FILE).is_file() if adapter else any(folder.glob("*.safetensors"))
    if not (weights and (adapter or (folder / "config.json").is_file())):
        raise UsageError(
            f"{given} holds no model (config.json and safetensors, or adapters of peft); give the folder of a"
            " finished run, its model/, or one that `fmmeta adapt` has written"
        )
    if adapter:
        adapters = read_json(str(folder.resolve()), "adapter_config.json", dict) or {}
        base = adapters.get("base_model_name_or_path")
        if not (isinstance(base, str) and is_hub_id(base)):
            raise UsageError(
                f"{given} holds adapters of {base}, which is not on the hub, so that they cannot be loaded"
                " from there; push merged/ (--lora_merge)"
            )
    return folder


def choose_files(folder: Path) -> tuple[list[str], dict[str, str]]:
    """Names of the files to upload, and of those that are left out with the reason.

    Raises `UsageError` for any other file, pickles among them, and for links that leave the folder.
    """
    paths = [path for path in sorted(folder.rglob("*")) if path.is_symlink() or not path.is_dir()]
    names = [path.relative_to(folder).as_posix() for path in paths]
    chosen = list(filter_repo_objects(names, ignore_patterns=[*LEFT_OUT]))
    known = list(filter_repo_objects(chosen, allow_patterns=SENT))
    for name in chosen:
        is_file = inside(folder, folder / name).is_file()
        refuse_first(
            [
                (
                    not is_file,
                    f"folder={folder} holds {name}, which is no file (a link without a target, or a device);"
                    " remove it",
                ),
                (
                    name not in known,
                    f"folder={folder} holds {name}, which is none of {' '.join(SENT)}; move it out of the"
                    " folder",
                ),
            ]
        )
    reasons = {name: [why for kind, why in LEFT_OUT.items() if fnmatch(name, kind)] for name in names}
    return chosen, {name.split("/")[0]: why[0] for name, why in reasons.items() if why}


def pushed_card(folder: Path, repo_id: str) -> bytes | None:
    """The card with the repository's name in its commands and in its model-index; None without a card.

    Raises `UsageError` for a card whose metadata cannot be read.
    """
    if not (folder / FILE).is_file():
        return None
    with usage_errors(f"folder={folder}: the metadata of {FILE} cannot be read", "fix or remove it"):
        card = ModelCard.load(folder / FILE)
        if card.data.get("eval_results"):
            card.data["model_name"] = repo_id
        card.text = card.text.replace(PLACEHOLDER, repo_id)
        return str(card).encode()
