"""Removal of secrets from every text and every setting that a process writes, prints or sends.

Three rules find secrets: the formats of providers' keys, values behind a name that means a secret, and the
values of environment variables with such a name.
"""

from __future__ import annotations

import base64
import json
import os
import re
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any
from urllib.parse import quote, quote_plus

UNCERTAIN = 1
"""Strength of a name that may mean something harmless: `token` may be a tokenizer's."""
SECRET = 2
"""Strength of a name that means a generated key: `api_key`."""
PASSWORD = 3
"""Strength of a name whose value may be any word, however short: `password`."""


def _split_words(words: str) -> frozenset[str]:
    return frozenset(words.split())


# Words and numbers of a name in any case: DB_PASSWORD, apiKey, token2.
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
# Last words of a name that do not change its meaning: API_KEY_PROD.
_QUALIFIERS = _split_words(
    "prod production dev staging test old new current backup value val str string text plain base64 b64 "
    "hex ro rw header env0 default"
)
# Ends of names whose strength is PASSWORD, and of those whose strength is SECRET, without separators.
_PASSWORDS = re.compile(r"(?:password|passwd|passphrase|passcode|sshpass)$")
_SECRETS = re.compile(
    r"(?:password|secret|credential|apikey|apitoken|accesskey|secretkey|privatekey|signingkey|encryptionkey|authkey"
    r"|accesstoken|refreshtoken|sessiontoken|securitytoken|authtoken|bearertoken|privatetoken|secretaccesskey"
    r"|connectionstring|connstr|authorization|clientsecret|secretkeybase|sessionid|sessid)s?$"
)
# Words before `pass` that make it a password: `db_pass`, not `first_pass`.
_BEFORE_PASS = _split_words(
    "db database smtp mail email user ftp admin root mysql pg postgres redis ssh login auth proxy http "
    "registry sudo vpn wifi ldap key store keystore mongo rabbitmq"
)
# Words before `key` that may mean a secret, and words that never do.
_KINDS_OF_KEY = _split_words(
    "account storage ssh deploy shared service session license subscription client hmac aes rsa jwt admin "
    "auth master signing encryption crypto write ingest integration openai anthropic wandb hf huggingface "
    "google gemini azure aws stripe sendgrid mailgun comet neptune mistral cohere groq together replicate "
    "deepseek langsmith pinecone datadog tavily serper fireworks nvidia ngc access secret private api"
)
_HARMLESS_KEYS = _split_words(
    "primary foreign sort partition cache group index map dict public query row column object state "
    "group_by lookup rng prng hash route routing shortcut hot unique natural composite"
)
# Words before `token` that mean a tokenizer's special tokens, or numbers of tokens.
_TOKENIZER_WORDS = _split_words(
    "eos bos pad unk sep cls mask image video audio start end stop special extra additional prefix suffix "
    "middle decoder encoder max min num per first last next prev previous new word text think thinking "
    "tool system assistant eot eom fim boi eoi content begin beginning sub input output target label reward "
    "memory register class cross single current newline space language lang sot nl eod document separator "
    "soft virtual prompt unknown padding masked sample generated predicted likeliest"
)
_SIGNATURES = frozenset({"sig", "signature", "sas"})
_UNCERTAIN_WORDS = frozenset(
    {"auth", "oauth", "pat", "cookie", "cookies", "bearer", "dsn", "webhook", "jwt", "otp"}
)
_URLS = frozenset({"url", "uri", "address"})
_HOOKS = frozenset({"webhook", "hook"})
# Last words of variables with AUTH in their name whose value is a method or an address, no secret.
_AUTH_SETTINGS = _split_words(
    "sock file path dir folder url uri host port type method mode user username enabled enable provider "
    "endpoint scheme audience domain id name timeout ttl realm region server service backend class module "
    "plugin"
)
# Values that are no secrets: states, types and words of a sentence, as in "password: required".
_COMMON_WORDS = _split_words(
    "required missing wrong invalid incorrect expired empty none null nil true false optional string str "
    "unset redacted hidden changed denied rejected undefined default yes no on off enabled disabled basic "
    "digest oauth oauth2 ntlm kerberos anonymous bearer token password secret ok failed unknown mismatch "
    "authentication not must is was the a an and or to for in of with if bool int float type bytes any "
    "self args kwargs given prompt env environment keyring ask inherit"
)
_SPECIAL_TOKEN = re.compile(r"<[^<>]*>|\[[A-Za-z_ ]+\]|</s>|[▁Ġ#]\S*|\{[^{}]*\}")
_VARIABLE = re.compile(r"\$\{?\{?[\w. ]+\}?\}?|%\w+%|\{\{.*\}\}|\$\(.*\)|os\.environ\b.*|env\(.*")
_METAVAR = re.compile(
    r"(?:YOUR|MY|THE)?_?[A-Z_]*(?:TOKEN|KEY|PASSWORD|SECRET|VALUE|ENV|VAR|FILE|PATH|NAME)[A-Z_]*"
)
_PATH = re.compile(
    r"(?:~|\.{1,2})?/(?:[\w.@%+ -]+/)+[\w.@%+ -]*|(?:~|\.{1,2})/[\w.-]*|/[\w-]+(?:\.\w+)?|[A-Z]:\\.*"
)
_CAMEL_CASE = re.compile(r"(?>(?:[A-Z]{0,5}+[a-z]{2,}+[._-]?+)+)[A-Z]{0,5}")


@lru_cache(maxsize=4096)
def get_name_strength(name: str) -> int:
    """Return how certainly a value of this name is a secret: 0, `UNCERTAIN`, `SECRET` or `PASSWORD`."""
    words = [word.lower() for word in _WORDS.findall(name)]
    while len(words) > 1 and (words[-1] in _QUALIFIERS or words[-1].isdigit()):
        words.pop()
    if not words:
        return 0
    last = words[-1]
    before = words[-2] if len(words) > 1 else ""
    joined = "".join(words)
    if _PASSWORDS.search(joined) or last == "pwd":
        return PASSWORD
    if last == "pass" and (before in _BEFORE_PASS or (before and name.isupper())):
        return PASSWORD
    if _SECRETS.search(joined) and before != "public":
        return SECRET
    if last == "key" and before:
        is_header = name.isupper() or name.lower().startswith("x-")
        is_secret = before in _KINDS_OF_KEY or (is_header and before not in _HARMLESS_KEYS)
        return UNCERTAIN if is_secret else 0
    if last.endswith("token"):
        kind = last.removesuffix("token") or before
        return 0 if kind in _TOKENIZER_WORDS else UNCERTAIN
    if last in _URLS and before in _HOOKS:
        return UNCERTAIN
    return UNCERTAIN if last in _UNCERTAIN_WORDS | _SIGNATURES else 0


@lru_cache(maxsize=4096)
def is_secret_variable(name: str, value: str) -> bool:
    """Return whether the value of this environment variable is hidden in every text.

    A short or common word is not hidden, since it would disappear from ordinary sentences.
    """
    if len(value) < 6 or value.lower() in _COMMON_WORDS or is_placeholder(value, UNCERTAIN):
        return False
    words = [word.lower() for word in _WORDS.findall(name)]
    has_auth = re.search(r"AUTH(?!OR(?!IZ))", name.upper()) and words[-1] not in _AUTH_SETTINGS
    if not (has_auth or get_name_strength(name) or words[-1:] == ["pat"]):
        return False
    if value.isalpha():  # a plain word counts from eight letters on
        return len(value) >= 8
    return not value.isdigit() or len(value) >= 8


def is_placeholder(value: str, strength: int) -> bool:
    """Return whether a value is no secret: a variable, a path, a tokenizer's token, a placeholder word."""
    text = value.strip()
    if not any(character.isalnum() for character in text) or "[redacted]" in text:
        return True
    if text.lower() in ("none", "null", "true", "false", "nil", "undefined") or _VARIABLE.fullmatch(text):
        return True
    if _SPECIAL_TOKEN.fullmatch(text) or _METAVAR.fullmatch(text) or text.endswith("..."):
        return True
    if strength == PASSWORD:
        return bool(_PATH.fullmatch(text)) and text.count("/") > 1
    if text.lower() in _COMMON_WORDS or _PATH.fullmatch(text):
        return True
    return strength == UNCERTAIN and bool(re.fullmatch(r"-?\d{1,7}(?:\.\d+)?", text))


def looks_random(value: str, min_length: int) -> bool:
    """Return whether a value of at least `min_length` characters looks random.

    Such a value mixes letters and digits, has symbols, or has capitals inside a word that is not camel case.
    """
    if len(value) < min_length or " " in value or not any(character.isalpha() for character in value):
        return False
    if any(character.isdigit() for character in value) or re.search(r"[!$%^*+=~]", value):
        return True
    return bool(re.search(r"[a-z][A-Z]", value)) and not _CAMEL_CASE.fullmatch(value)


REDACTED = "[redacted]"
MAX_VALUE_LENGTH = 4096
"""Largest number of characters of a quoted value that is searched for."""
_declared_variables = set[str]()
"""Names of environment variables whose values are hidden whatever the name."""

# Atomic groups, since Python before 3.11.5 matches possessive quantifiers of groups wrongly.
_PRIVATE_KEY = re.compile(
    r"""-----BEGIN\ [A-Z0-9 ]{0,40}PRIVATE\ KEY(?:\ BLOCK)?-----
        (?: [^-]*+(?>(?:-(?!----(?:BEGIN|END)\ )[^-]*+)*)
            -----END\ [A-Z0-9 ]{0,40}PRIVATE\ KEY(?:\ BLOCK)?-----
        | (?>(?:(?>(?:\s|\\[nr])*)[A-Za-z0-9+/=]{16,}+)+) )
    | Private-(?:MAC|Hash):\ \S+""",
    re.VERBOSE,
)
# Formats of providers' keys.
_KEY_FORMATS = re.compile(
    r"""\b(?:
    # Model hubs, trackers, model servers.
      hf_[A-Za-z0-9]{20,} | api_org_[A-Za-z0-9]{20,} | wandb_v1_\w{20,} | local-[0-9a-f]{40}\b
    | sk-(?:ant|proj|or|lf|svcacct|admin|live|test|None)-[\w-]{8,} | sk-(?=[A-Za-z]{0,40}\d)[A-Za-z0-9_]{16,}
    | (?:gsk|xai|pplx|nvapi|r8|tgp_v1|fw|rpa|esecret|lsv2_pt|lsv2_sk|csk)[_-](?=[A-Za-z_]{0,40}\d)[\w-]{20,}
    | eyJhcGlf[\w+/=]{20,}
    # Clouds.
    | A(?:3T[A-Z0-9]|BIA|CCA|KIA|SIA)[0-9A-Z]{16}\b | AGE-SECRET-KEY-[0-9A-Z-]{20,}
    | AIza[\w-]{30,} | ya29\.[\w-]{20,} | GOCSPX-[\w-]{20,} | 1//0[\w-]{25,}
    | \w{3}\dQ~[\w~.-]{31,} | dapi[0-9a-f]{32}(?:-\d)?\b | do[por]_v1_[0-9a-f]{64}\b
    | hv[sbr]\.[\w-]{20,} | pul-[0-9a-f]{40}\b | dp\.(?:pt|st|ct|sa|scim|audit)\.[\w.-]{20,}
    # Forges, registries, chats, payments.
    | gh[pousr]_[A-Za-z0-9]{20,} | github_pat_\w{20,}
    | gl(?:pat|dt|ft|soat|rt|cbt|imt|ptt|agent|oas|ffct|wt)-[\w.-]{16,} | AT(?:ATT3|BB)[\w=-]{20,}
    | npm_[A-Za-z0-9]{30,} | pypi-[\w-]{50,} | rubygems_[0-9a-f]{40,} | dckr_[po]at_[\w-]{20,}
    | xox[a-z](?:\.xox[a-z])?-[\w-]{10,} | xapp-\d-[\w-]{10,} | (?:bot)?\d{8,10}:[\w-]{35}(?![\w-])
    | [MNO][A-Za-z\d_-]{23,25}\.[A-Za-z\d_-]{6}\.(?=[\w-]{0,40}\d)[A-Za-z\d_-]{27,}
    | [sr]k_(?:live|test)_[0-9a-zA-Z]{16,} | whsec_[\w+/=]{20,} | SG\.[\w-]{16,}\.[\w-]{16,}
    | sq0[a-z]{3}-[\w-]{22,} | shp(?:at|ss|ca|pa)_[0-9a-fA-F]{32}\b | key-[0-9a-f]{32}\b
    | (?:glsa|lin_api|figd|sntrys|sntryu|PMAK|ntn|CFPAT|phx)[_-](?=[A-Za-z_]{0,40}[0-9])[\w=+/-]{20,}
    | NRAK-[A-Z0-9]{27}\b | pat[A-Za-z0-9]{14}\.[0-9a-f]{64}\b | \w{14}\.atlasv1\.[\w-]{60,}
    | (?<!-)eyJ[\w-]{8,}+\.[\w-]{8,}+(?:\.[\w-]*+)*
    )""",
    re.VERBOSE,
)
# Formats of keys that are also found directly behind another word, without a word boundary.
_KEY_FORMATS_INSIDE_WORDS = re.compile(
    r"""A(?:3T[A-Z0-9]|BIA|CCA|KIA|SIA)[0-9A-Z]{16} | gh[opsur]_[A-Za-z0-9_]{36} | SG\.[\w-]{22}\.[\w-]{43}
    | gl(?:(?:pat|dt|ft|soat|rt|cbt|imt|ptt|agent|oas)-[\w-]{20,64}) | GR1348941[\w-]{20,50}
    | (?<![^\s=:"])AKC(?=[A-Za-z]{0,80}\d)[A-Za-z0-9]{10,} | (?:AC|SK)(?=[a-z]{0,31}\d)[a-z0-9]{32}
    | pypi-AgE[\w-]{80,} | sq0csp-[\w\\-]{43} | [rs]k_live_[0-9a-zA-Z]{24}
    | AccountKey=[a-zA-Z0-9+/=]{88} | xox[abposr]-(?>(?:\d+-)+)[a-z0-9]+""",
    re.VERBOSE,
)
# `user:password@` in a URL. A number behind the colon is a port, and a digest behind the @ is a container
# image's.
_URL_PASSWORD = (
    r"(?<=://)[^\s/:@\[\]\"'<>]{0,256}+:(?!\d{1,5}(?:[/,?#]|$))[^\s\"'<>@]{0,256}+"
    r"(?>(?:@[^\s/\"'<>@]{0,256}+(?=@))*)(?=@)(?!@sha\d)"
)
_URL_PATH = r"""(?x)
    (?<=\bhooks\.slack\.com/)[\w/-]{20,} | (?<=\bdiscord\.com/api/webhooks/)\d+/[\w-]+
    | (?<=\bdiscordapp\.com/api/webhooks/)\d+/[\w-]+ | (?<=\.webhook\.office\.com/)[\w/@-]{20,}
    | (?<=[?&]key=)(?=[A-Za-z_]{0,40}\d)\w{20,}"""
_COMMIT = re.compile(r"(?i)commit|revision|sha|hash|fingerprint|digest|index")
_AUTHORIZATION = (
    r"(?i)(authorization\\*[\"']?\s*[:=,]\s*b?\\*[\"']?\s*"
    r"(?:Bearer|Basic|Token|ApiKey|Api-Key|Bot|Negotiate|Digest|Splunk|GenieKey|SSWS)\s+)"
    r"([^\s\"'\\,;]{2,}|[^\s\"'\\]{2,})"
)
_PASSWORD_IN_A_SENTENCE = (
    r"(?i)(\bpass(?:word|phrase|wd)[ ]+(?:(?:is|was)[ ]+)?[\"']?)"
    r"(?=[a-z!$%&*+.-]{0,40}\d)(?=\d{0,40}[a-z])([^\s\"',;=]{6,})"
)
_TOKEN_IN_A_SENTENCE = (
    r"(?i)(\b(?:token|api[ _-]?key|secret)[ ]+(?:(?:is|was)[ ]+)?[\"']?)"
    r"(?=[a-z]{0,80}\d)(?=\d{0,80}[a-z])([a-z0-9]{20,})"
)
_BEARER = r"(?i)(\bbearer[ \t]+)(?=[A-Za-z_./+~-]{0,200}\d)([\w.~+/-]{8,}=*)"


def _hide(match: re.Match[str]) -> str:
    """Hide the match of an expression without groups, else the second of its two groups.

    A placeholder in the second group stays.
    """
    if not match.re.groups:
        return REDACTED
    return match[0] if is_placeholder(match[2], PASSWORD) else match[1] + REDACTED


def _hide_url_token(match: re.Match[str]) -> str:
    """Hide the token of `https://TOKEN@host`, but not the user of `ssh://git@host`."""
    scheme = match.string[max(0, match.start() - 8) : match.start()].lower()
    is_web = scheme.endswith(("http://", "https://"))
    is_token = looks_random(match[1], 8 if is_web else 16) or (is_web and len(match[1]) >= 16)
    return REDACTED if is_token and not is_placeholder(match[1], PASSWORD) else match[0]


def _hide_wandb_key(match: re.Match[str]) -> str:
    """Hide a key of W&B, unless the text before it speaks of a commit or a hash."""
    return match[0] if _COMMIT.search(match[1]) else match[1] + REDACTED


def _hide_basic_auth(match: re.Match[str]) -> str:
    """Hide the credentials of HTTP basic authentication: `user:password` in base64."""
    try:
        is_pair = b":" in base64.b64decode(match[2] + "=" * (-len(match[2]) % 4), validate=True)
    except ValueError:
        is_pair = False
    return match[1] + REDACTED if is_pair else match[0]


def _hide_xml_element(match: re.Match[str]) -> str:
    """Hide the content of an XML element whose name means a secret."""
    is_secret = get_name_strength(match[1]) >= SECRET and not is_placeholder(match[2], PASSWORD)
    return f"<{match[1]}>{REDACTED}</" if is_secret else match[0]


_RULES: list[tuple[str, str, Callable[[re.Match[str]], str]]] = [
    ("://", _URL_PATH, _hide),
    ("://", _URL_PASSWORD, _hide),
    ("://", r"(?<=://)([^\s/:@\[\]\"'<>?#]{1,512}+)(?=@)", _hide_url_token),
    ("jdbc:oracle", r"(?<=jdbc:oracle:thin:)[^\s/@]{1,128}/[^\s@]{1,256}(?=@)", _hide),
    # W&B's older keys look like git commits, so they count only near the word wandb.
    ("wandb", r"(?i)(?<=wandb)(\W[^\n]{0,40}?)\b[0-9a-f]{40}\b", _hide_wandb_key),
    ("-us", r"[0-9a-z]{32}-us[0-9]{1,2}", _hide),
    ("Basic ", r"(\bBasic[ \t]+)([A-Za-z0-9+/]{6,}={0,2})", _hide_basic_auth),
    ("uthorization", _AUTHORIZATION, _hide),
    ("UTHORIZATION", _AUTHORIZATION, _hide),
    ("earer ", _BEARER, _hide),
    ("EARER ", _BEARER, _hide),
    # Programs that take a password as an argument.
    ("curl", r"(\bcurl\b[^\n]{0,300}?\s(?:-u|--user|-U|--proxy-user)[ =]?[\"']?[^\s:\"']+:)(\S+)", _hide),
    ("docker", r"(\bdocker\b[^\n]{0,300}?\s-p[ ]?[\"']?)([^\s\"':]+)(?=[\"']?(?:\s|$))", _hide),
    ("sshpass", r"(\bsshpass\s+-p[ ]?[\"']?)([^\s\"']+)", _hide),
    ("mysql", r"(\bmysql\w*[^\n]{0,300}?\s-p[\"']?)([^\s\"']+)", _hide),
    (" password ", r"(\b(?:login|machine|account)[ \t]+\S{1,256}\s+password[ \t]+)(\S+)", _hide),
    ("auth=(", r"(\bauth=\(\s*[\"'][^\"'\n]{0,256}[\"'],\s*[\"'])([^\"'\n]{1,256})", _hide),
    ("ass", _PASSWORD_IN_A_SENTENCE, _hide),
    (" ", _TOKEN_IN_A_SENTENCE, _hide),
    ("</", r"<([A-Za-z][\w.-]{0,80})>([^<>\n]{1,512})</", _hide_xml_element),
]
"""Substring of every match as a fast test, expression, and function that returns the replacement."""
_COMPILED_RULES = [(mark, re.compile(expression), replacement) for mark, expression, replacement in _RULES]
# Parts of names that may mean a secret. They find the candidates; _NAME then matches the name and the
# separator of `name = value`, `"name": value`, `['name'] = value` and `--name value`, and _find_secret
# reads the value.
_NAME_PART = re.compile(
    r"pass|pwd|secret|token|key|auth|cred|pat(?![a-z])|cookie|bearer|dsn(?![a-z])|hook|jwt(?![a-z])|otp(?![a-z])"
    r"|sig(?:nature)?(?![a-z])|sas(?![a-z])|conn|sess"
)
_NAME = re.compile(
    r"""(?P<dashes>-{0,2})(?P<name>\w[\w-]{0,100}+)
    (?P<close>\\{0,4}["']?\]?)
    (?P<separator>[ \t]*(?:=>|:=|:(?!:)|={1,2}|,(?=[ \t]*["']))[ \t]*|[ \t]+(?=[^\s=:]))""",
    re.VERBOSE,
)
_QUOTED = re.compile(r"(?:[brfuBRFU]{0,2})(\\{0,4}[\"'])")
_BARE = re.compile(r"(?:[^\s\"'&;,]|,(?![\s\"']|\w+[=:]|$)){1,4096}")
_CALL = re.compile(r"[A-Za-z_][\w.]*[(\[]")


def redact_text(text: str) -> str:
    """Return the text with secrets replaced; a text without secrets is returned unchanged."""
    if "PRIVATE KEY" in text or "Private-" in text:
        text = _PRIVATE_KEY.sub(REDACTED, text)
    text = _KEY_FORMATS.sub(REDACTED, text)
    text = _KEY_FORMATS_INSIDE_WORDS.sub(REDACTED, text)
    if (values := _get_environment_pattern()) is not None:
        text = values.sub(REDACTED, text)
    for mark, expression, replacement in _COMPILED_RULES:
        if mark in text:
            text = expression.sub(replacement, text)
    return _redact_assignments(text)


def redact(tree: Any, name: str = "") -> Any:
    """Return a tree of plain values with secrets replaced; objects of other types stay as they are.

    Args:
        tree: Dicts, lists and tuples of plain values, or one value.
        name: Name of the field that has the tree as its value; empty if unknown.
    """
    if isinstance(tree, dict):
        variable = tree.get("name", tree.get("key"))
        if isinstance(variable, str) and "value" in tree:  # an entry of a list of environment variables
            return {key: redact(value, variable if key == "value" else "") for key, value in tree.items()}
        return {
            _redact_key(key): redact(value, _choose_deciding_name(str(key), name))
            for key, value in tree.items()
        }
    if isinstance(tree, (list, tuple)):
        before = ["", *tree]  # in ["--token", "x"] the entry before the value names it
        entries = (
            REDACTED if _is_option_value(option, value) else redact(value, name)
            for option, value in zip(before, tree, strict=False)
        )
        return [*entries] if isinstance(tree, list) else tuple(entries)
    strength = get_name_strength(name) if name else 0
    if isinstance(tree, (int, float)) and not isinstance(tree, bool):
        return REDACTED if strength == PASSWORD else tree
    if not isinstance(tree, str):
        return tree
    return REDACTED if _is_secret_field(tree, strength, name) else redact_text(tree)


def declare_secret_variable(name: str) -> None:
    """Hide the value of this environment variable from now on, whatever its name is."""
    _declared_variables.add(name)


def _redact_key(key: Any) -> Any:
    return redact_text(key) if isinstance(key, str) else key


def _choose_deciding_name(name: str, parent: str) -> str:
    """Return the name that decides whether a value is secret: its key, or the name of the dict around it.

    `secrets: {a: x}` hides x, and `auth: {user: x, password: y}` hides only y.
    """
    is_collection = parent and parent.lower().endswith(
        ("secrets", "credentials", "passwords", "keys", "tokens")
    )
    return parent if is_collection and get_name_strength(parent) and not get_name_strength(name) else name


def _is_option_value(option: Any, value: Any) -> bool:
    """Return whether an entry of a list is the secret of the option before it: `--token x`."""
    if not (isinstance(option, str) and option.startswith("--") and isinstance(value, str)):
        return False
    strength = get_name_strength(option[2:])
    return strength > 0 and not value.startswith("-") and not is_placeholder(value, strength)


def _is_secret_field(value: str, strength: int, name: str) -> bool:
    """Return whether the whole value of a field is a secret."""
    if "wandb" in name.lower() and re.fullmatch(r"[0-9a-f]{40}", value):
        return True
    if not strength or is_placeholder(value, strength):
        return False
    if strength == UNCERTAIN:
        if name.lower() == "token":
            return looks_random(value, 8) or len(value) >= 20
        return len(value) >= 8
    return True


def _get_environment_pattern() -> re.Pattern[str] | None:
    """Return an expression for this environment's secrets, now; `None` if it has none."""
    return _compile_values(frozenset(os.environb.items()), frozenset(_declared_variables))


@lru_cache(maxsize=4)
def _compile_values(
    environment: Iterable[tuple[bytes, bytes]], declared: frozenset[str]
) -> re.Pattern[str] | None:
    """Return an expression that matches the values of secret variables: plain, quoted, and in base64.

    Args:
        environment: Name and value of each environment variable.
        declared: Names of variables that are secret whatever their name.

    Returns:
        The expression, or `None` if no variable is secret.
    """
    patterns = set[str]()
    for raw_name, raw_value in environment:
        name = os.fsdecode(raw_name)
        value = os.fsdecode(raw_value).strip()
        if name not in declared and not is_secret_variable(name, value):
            continue
        spellings = {
            value,
            json.dumps(value)[1:-1],
            json.dumps(value, ensure_ascii=False)[1:-1],
            repr(value)[1:-1],
        }
        spellings |= {call(value, errors="replace") for call in (quote, quote_plus)}
        spellings.add(quote(value, safe="", errors="replace"))
        spellings.add(base64.b64encode(raw_value.strip()).decode().rstrip("="))
        # A short value may also be part of a longer word, so it counts only as a whole word.
        is_short = len(value) < 12 or not looks_random(value, 12)
        before = r"(?<![^\W_])" if is_short else ""
        after = r"(?![^\W_])" if is_short else ""
        patterns |= {f"{before}{re.escape(spelling)}{after}" for spelling in spellings}
    return re.compile("|".join(sorted(patterns, key=len, reverse=True))) if patterns else None


def _redact_assignments(text: str) -> str:
    """Replace the values of assignments to names that mean a secret."""
    parts = list[str]()
    copied_to = 0
    searched_to = 0
    lowered = text.lower()
    if len(lowered) != len(text):  # positions in `lowered` would not be those in `text`
        lowered = text
    for hit in _NAME_PART.finditer(lowered):
        if hit.start() < searched_to:
            continue
        start = hit.start()
        while start > max(searched_to, hit.start() - 80) and (
            text[start - 1].isalnum() or text[start - 1] in "_-"
        ):
            start -= 1
        match = _NAME.match(text, start)
        if match is None:
            searched_to = hit.end()
            continue
        searched_to = match.end("name")
        strength = get_name_strength(match["name"])
        if not strength:
            continue
        if (span := _find_secret(text, match, strength)) is not None:
            parts += [text[copied_to : span[0]], REDACTED]
            copied_to = searched_to = span[1]
    return "".join([*parts, text[copied_to:]]) if parts else text


def _find_secret(text: str, match: re.Match[str], strength: int) -> tuple[int, int] | None:
    """Return begin and end of the secret that follows a name; `None` if its value is no secret.

    Args:
        text: The whole text.
        match: Match of `_NAME`.
        strength: Strength of the name.
    """
    separator = match["separator"].strip()
    start = match.end()
    is_option = len(match["dashes"]) == 2
    if not separator and not is_option:
        return None
    if (opening := _QUOTED.match(text, start)) is not None:
        quote_ = opening[1]
        start = opening.end()
        end = text.find(quote_, start, start + MAX_VALUE_LENGTH)
        while end > 0 and len(quote_) == 1 and text[end - 1] == "\\" and text[end - 2] != "\\":
            end = text.find(quote_, end + 1, start + MAX_VALUE_LENGTH)
        if end > start and "\n" not in text[start:end]:
            value = text[start:end]
            # A comma after a quoted name separates it from its value, as in ("--token", "x").
            is_pair = separator != "," or (match["close"] and (is_option or looks_random(value, 4)))
            return (start, end) if is_pair and _is_quoted_secret(value, strength, match["name"]) else None
    if separator == "," or (bare := _BARE.match(text, start)) is None:
        return None
    value = bare[0].rstrip(").]}:!?>`\\")
    return (start, start + len(value)) if _is_bare_secret(text, match, value, strength) else None


def _is_quoted_secret(value: str, strength: int, name: str) -> bool:
    """Return whether a value in quotes is a secret, as in `password="hunter2"`."""
    if is_placeholder(value, strength):
        return False
    if strength > UNCERTAIN:
        return True
    return looks_random(value, 8) or (name.lower() != "token" and len(value) >= 8 and " " not in value)


def _is_bare_secret(text: str, match: re.Match[str], value: str, strength: int) -> bool:
    """Return whether an unquoted value is a secret, as in `password: hunter2`.

    Words of a sentence and code are none, as in "password: see below" and `token = f(x)`.
    """
    separator = match["separator"]
    end = match.end() + len(value)
    name = match["name"]
    if not value or is_placeholder(value, strength) or _CALL.match(value) or value.lower() == name.lower():
        return False
    if value.startswith(REDACTED[:-1]) or (value[0] in "([{<" and separator != "="):
        return False
    if value.rpartition(".")[2].lower() == name.lower():  # an attribute, as self.password
        return False
    if looks_random(value, 8 if strength == UNCERTAIN else 4):
        return True
    if strength == PASSWORD and len(value) >= 4 and any(character.isdigit() for character in value):
        return True
    is_alone = re.match(r"[\"'`,;}\])]*[ \t]*(?:$|[\r\n]|--?\w)", text[end : end + 8]) is not None
    before = text[match.start() - 1 : match.start()]
    if before in ("?", "&"):  # a parameter of a URL
        return True
    if separator == "=":
        is_typed = len(match["dashes"]) == 2 or name.isupper()
        return strength == PASSWORD or (len(value) >= 4 and (strength == SECRET or is_typed))
    is_long = strength == PASSWORD or (strength == SECRET and len(value) >= 16)
    return is_long and is_alone and not is_placeholder(value, SECRET)
