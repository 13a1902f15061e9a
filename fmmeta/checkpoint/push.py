"""`fmmeta push`: uploads an exported model to the Hugging Face Hub.

    run or model folder --> list of files with sizes --> create_repo, create_commit

Only safetensors, configurations, cards and tokenizer files are uploaded: exactly those that were listed. The
card on the hub names the repository in its commands and in its model-index; the folder itself stays as it is.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

import huggingface_hub
from huggingface_hub import ModelCard, constants
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils import validate_repo_id
from tqdm import tqdm

from fmmeta.checkpoint.model_card import FILE, PLACEHOLDER, is_hub_id
from fmmeta.checkpoint.read import MANIFEST
from fmmeta.common.errors import UsageError, one_line, usage_errors
from fmmeta.common.security import inside, printable, redact
from fmmeta.config.fields import refuse_first, setting
from fmmeta.learners.files import ADAPTER_FILE, hub_answers, read_json

SUFFIXES = (".safetensors", ".json", ".txt", ".md", ".jinja")
TOKENIZERS = ("*.model", "*.bpe.codes", "*.vocab")  # files of tokenizers with other endings
LEFT_OUT = {
    "predictions.jsonl": "texts of the query set",
    "merged": "another model; push it by its folder",
    "*.trials.json": "of an unfinished fmmeta tune or evaluate",
    "*.finished.json": "of an unfinished fmmeta tune or evaluate",
}
"""What commands write beside a model, and why it is not uploaded."""
ANSWERS = {
    401: "the hub does not accept the token; log in again with `hf auth login`, or set HF_TOKEN",
    403: "the token may not write there; use a token with write access, and your own user or organisation",
    404: "the hub has no such user, organisation or branch; check repo_id and revision",
}


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
    token = "" if settings.dry_run else usable_token(settings.repo_id)
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
    api = huggingface_hub.HfApi(token=token)
    with hub_errors(settings.repo_id):
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
    named = False
    with suppress(HFValidationError):
        validate_repo_id(repo_id)
        named = repo_id.count("/") == 1
    refuse_first(
        [
            (not repo_id, "repo_id is missing; give --repo_id USER/NAME"),
            (
                not named,
                f"repo_id={repo_id} is no name of a repository; give USER/NAME of letters, digits, -, _ and ."
                " (no -- or ..)",
            ),
        ]
    )


def usable_token(repo_id: str) -> str:
    """The user's token. Raises `UsageError` without a token or a network."""
    given, token = f"repo_id={repo_id}", huggingface_hub.get_token()
    refuse_first(
        [
            (
                constants.HF_HUB_OFFLINE,
                f"{given} cannot be uploaded to with HF_HUB_OFFLINE=1; unset HF_HUB_OFFLINE",
            ),
            (not token, f"{given} needs a token of the hub; set HF_TOKEN, or run `hf auth login`"),
        ]
    )
    if not hub_answers():
        raise UsageError(f"{given}: {constants.ENDPOINT} cannot be reached; check the network")
    return str(token)


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
    chosen, left_out = list[str](), dict[str, str]()
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        top = name.parts[0]
        why = next((why for kind, why in LEFT_OUT.items() if fnmatch(top, kind)), "")
        if why or any(part.startswith(".") for part in name.parts):
            left_out[top] = why or "hidden"
            continue
        inside(folder, path)
        if path.is_dir():
            continue
        known = path.suffix in SUFFIXES or any(fnmatch(path.name, kind) for kind in TOKENIZERS)
        refuse_first(
            [
                (
                    not path.is_file(),
                    f"folder={folder} holds {name}, which is no file (a link without a target, or a device);"
                    " remove it",
                ),
                (
                    not known,
                    f"folder={folder} holds {name}, which is none of {' '.join(SUFFIXES)} or a tokenizer's"
                    " file; move it out of the folder",
                ),
            ]
        )
        chosen.append(name.as_posix())
    return chosen, left_out


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


@contextmanager
def hub_errors(repo_id: str) -> Iterator[None]:
    """Raise a `UsageError` of one line for an error of the hub or of the network."""
    try:
        yield
    except HfHubHTTPError as error:
        status = error.response.status_code
        text = redact(printable(error.server_message or one_line(error)))[:300]
        why = ANSWERS.get(status) or f"{text}; try again later"
        raise UsageError(f"repo_id={repo_id}: {why} (HTTP status {status})") from None
    except Exception as error:  # each HTTP client has other exceptions
        raise UsageError(
            f"repo_id={repo_id}: the upload failed ({type(error).__name__}: {redact(one_line(error))[:300]});"
            " run the command again, files that were uploaded are not sent again"
        ) from None
