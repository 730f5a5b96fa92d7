"""Adapters on the Hugging Face hub: finding them, and putting them there. Bases are found by transformers itself."""

from pathlib import Path

from dodo.config import CONFIG_FILE
from dodo.errors import InputError, first_line
from dodo.thresholds import THRESHOLDS_FILE

__all__ = ["find_adapters", "is_hub_id", "upload"]

_FILES = [CONFIG_FILE, "README.md", "*.safetensors", "*/adapter_config.json", "*/adapter_model.safetensors", THRESHOLDS_FILE]


def is_hub_id(name: str) -> bool:
    """Whether a name can be an owner and a repository, and is nothing on this machine."""
    return name.count("/") == 1 and not name.startswith((".", "/", "~")) and not name.endswith("/") and not Path(name).exists()


def find_adapters(name: str, revision: str | None = None) -> Path | None:
    """Download the adapters of a repository, or find them in the hub's cache.

    Args:
        name: owner and repository.
        revision: branch, tag or commit.

    Returns:
        Their folder, or None if the repository holds no `dodo_config.json`: then it is a base.

    Raises:
        InputError: no such repository or revision, no access to it, or no connection and nothing in the cache.
    """
    from huggingface_hub import hf_hub_download, snapshot_download, try_to_load_from_cache
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        hf_hub_download(name, CONFIG_FILE, revision=revision)
        return Path(snapshot_download(name, revision=revision, allow_patterns=_FILES))
    except LocalEntryNotFoundError:
        if isinstance(try_to_load_from_cache(name, "config.json", revision=revision), str):
            return None
        reason = "the hub can't be reached, and it is not in the hub's cache"
    except EntryNotFoundError:
        return None
    except GatedRepoError:
        reason = "its owner must grant access to it first; see its page on the hub, and log in with 'hf auth login'"
    except RepositoryNotFoundError:
        reason = "the hub knows no such repository, or it is private: then log in with 'hf auth login'"
    except RevisionNotFoundError:
        reason = f"it has no revision {revision!r}"
    except HfHubHTTPError as error:
        reason = first_line(error)
    except HFValidationError:
        reason = "that is no name of a repository"
    except Exception as error:  # of the HTTP client or a proxy: they have no base in common
        reason = first_line(error)
    raise InputError(f"{name!r} is no local folder, and could not be loaded from the hub: {reason}") from None


def upload(folder: Path, repo_id: str, *, private: bool, token: str | None) -> str:
    """Commit a folder's files to a repository, which is made if there is none.

    Returns:
        The commit's address.

    Raises:
        InputError: not allowed, no such owner, no connection.
    """
    from huggingface_hub import HfApi

    api = HfApi(token=token)
    try:
        api.create_repo(repo_id, private=private, exist_ok=True)
        return str(api.upload_folder(repo_id=repo_id, folder_path=folder, commit_message="Upload Dodo adapters"))
    except Exception as error:  # of the hub, its HTTP client, or the network: they have no base in common
        raise InputError(f"could not upload to {repo_id!r}: {first_line(error)}") from error
