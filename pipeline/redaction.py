"""Removes secrets from every text and every setting that a process writes, prints or sends.

Three rules find them: the forms that providers give their keys, names that say "secret" in front of a value,
and the values of environment variables with such names.
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

UNCERTAIN, SECRET, PASSWORD = 1, 2, 3
"""How sure a name says it: `token` may be a tokenizer's, `api_key` has a key, a password may be any word."""


def _set(words: str) -> frozenset[str]:
    return frozenset(words.split())


_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_QUALIFIERS = _set(
    "prod production dev staging test old new current backup value val str string text plain base64 b64 "
    "hex ro rw header env0 default"
)
_PASSWORDS = re.compile(r"(?:password|passwd|passphrase|passcode|sshpass)$")
_SECRETS = re.compile(
    r"(?:password|secret|credential|apikey|apitoken|accesskey|secretkey|privatekey|signingkey|encryptionkey|authkey"
    r"|accesstoken|refreshtoken|sessiontoken|securitytoken|authtoken|bearertoken|privatetoken|secretaccesskey"
    r"|connectionstring|connstr|authorization|clientsecret|secretkeybase|sessionid|sessid)s?$"
)
_BEFORE_PASS = _set(
    "db database smtp mail email user ftp admin root mysql pg postgres redis ssh login auth proxy http "
    "registry sudo vpn wifi ldap key store keystore mongo rabbitmq"
)
_KINDS_OF_KEY = _set(
    "account storage ssh deploy shared service session license subscription client hmac aes rsa jwt admin "
    "auth master signing encryption crypto write ingest integration openai anthropic wandb hf huggingface "
    "google gemini azure aws stripe sendgrid mailgun comet neptune mistral cohere groq together replicate "
    "deepseek langsmith pinecone datadog tavily serper fireworks nvidia ngc access secret private api"
)
_HARMLESS_KEYS = _set(
    "primary foreign sort partition cache group index map dict public query row column object state "
    "group_by lookup rng prng hash route routing shortcut hot unique natural composite"
)
# Tokens that a tokenizer has, or that are counted.
_OF_TOKENIZERS = _set(
    "eos bos pad unk sep cls mask image video audio start end stop special extra additional prefix suffix "
    "middle decoder encoder max min num per first last next prev previous new word text think thinking "
    "tool system assistant eot eom fim boi eoi content begin beginning sub input output target label reward "
    "memory register class cross single current newline space language lang sot nl eod document separator "
    "soft virtual prompt unknown padding masked sample generated predicted likeliest"
)
_SIGNATURES = frozenset({"sig", "signature", "sas"})
_OTHER = frozenset({"auth", "oauth", "pat", "cookie", "cookies", "bearer", "dsn", "webhook", "jwt", "otp"})
_URLS = frozenset({"url", "uri", "address"})
_HOOKS = frozenset({"webhook", "hook"})
# What a variable whose name has AUTH ends with where it is about a method or a place.
_ABOUT_AUTH = _set(
    "sock file path dir folder url uri host port type method mode user username enabled enable provider "
    "endpoint scheme audience domain id name timeout ttl realm region server service backend class module "
    "plugin"
)
_STATUS = _set(
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
def strength_of(name: str) -> int:
    """Return how surely a value of this name is a secret: 0, UNCERTAIN, SECRET or PASSWORD."""
    words = [word.lower() for word in _WORDS.findall(name)]
    while len(words) > 1 and (words[-1] in _QUALIFIERS or words[-1].isdigit()):
        words.pop()
    if not words:
        return 0
    last, before, joined = words[-1], words[-2] if len(words) > 1 else "", "".join(words)
    if _PASSWORDS.search(joined) or last == "pwd":
        return PASSWORD
    if last == "pass" and (before in _BEFORE_PASS or (before and name.isupper())):
        return PASSWORD
    if _SECRETS.search(joined) and before != "public":
        return SECRET
    if last == "key" and before:
        is_header = name.isupper() or name.lower().startswith("x-")
        is_one = before in _KINDS_OF_KEY or (is_header and before not in _HARMLESS_KEYS)
        return UNCERTAIN if is_one else 0
    if last.endswith("token"):
        kind = last.removesuffix("token") or before
        return 0 if kind in _OF_TOKENIZERS else UNCERTAIN
    if last in _URLS and before in _HOOKS:
        return UNCERTAIN
    return UNCERTAIN if last in _OTHER | _SIGNATURES else 0


@lru_cache(maxsize=4096)
def is_secret_variable(name: str, value: str) -> bool:
    """Return whether the value of this environment variable is hidden wherever a text has it.

    A short or common word is not: it would be hidden in every sentence.
    """
    if len(value) < 6 or value.lower() in _STATUS or is_placeholder(value, UNCERTAIN):
        return False
    words = [word.lower() for word in _WORDS.findall(name)]
    has_auth = re.search(r"AUTH(?!OR(?!IZ))", name.upper()) and words[-1] not in _ABOUT_AUTH
    if not (has_auth or strength_of(name) or words[-1:] == ["pat"]):
        return False
    if value.isalpha():  # a word: one of eight letters or more that is none of those above
        return len(value) >= 8
    return not value.isdigit() or len(value) >= 8


def is_placeholder(value: str, strength: int) -> bool:
    """Return whether a value is no secret: a variable, a path, a tokenizer's token, a word for one."""
    text = value.strip()
    if not any(character.isalnum() for character in text) or "[redacted]" in text:
        return True
    if text.lower() in ("none", "null", "true", "false", "nil", "undefined") or _VARIABLE.fullmatch(text):
        return True
    if _SPECIAL_TOKEN.fullmatch(text) or _METAVAR.fullmatch(text) or text.endswith("..."):
        return True
    if strength == PASSWORD:
        return bool(_PATH.fullmatch(text)) and text.count("/") > 1
    if text.lower() in _STATUS or _PATH.fullmatch(text):
        return True
    return strength == UNCERTAIN and bool(re.fullmatch(r"-?\d{1,7}(?:\.\d+)?", text))


def looks_random(value: str, least: int) -> bool:
    """Return whether a value looks drawn: letters and digits, symbols, or capitals within a word."""
    if len(value) < least or " " in value or not any(character.isalpha() for character in value):
        return False
    if any(character.isdigit() for character in value) or re.search(r"[!$%^*+=~]", value):
        return True
    return bool(re.search(r"[a-z][A-Z]", value)) and not _CAMEL_CASE.fullmatch(value)


REDACTED = "[redacted]"
LONGEST_VALUE = 4096
_declared_variables = set[str]()

# Atomic groups, since Python before 3.11.5 does not match possessive quantifiers of groups as it should.
_PRIVATE_KEY = re.compile(
    r"""-----BEGIN\ [A-Z0-9 ]{0,40}PRIVATE\ KEY(?:\ BLOCK)?-----
        (?: [^-]*+(?>(?:-(?!----(?:BEGIN|END)\ )[^-]*+)*)
            -----END\ [A-Z0-9 ]{0,40}PRIVATE\ KEY(?:\ BLOCK)?-----
        | (?>(?:(?>(?:\s|\\[nr])*)[A-Za-z0-9+/=]{16,}+)+) )
    | Private-(?:MAC|Hash):\ \S+""",
    re.VERBOSE,
)
_FORMS = re.compile(
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
# Keys that a word may stand directly in front of.
_INSIDE = re.compile(
    r"""A(?:3T[A-Z0-9]|BIA|CCA|KIA|SIA)[0-9A-Z]{16} | gh[opsur]_[A-Za-z0-9_]{36} | SG\.[\w-]{22}\.[\w-]{43}
    | gl(?:(?:pat|dt|ft|soat|rt|cbt|imt|ptt|agent|oas)-[\w-]{20,64}) | GR1348941[\w-]{20,50}
    | (?<![^\s=:"])AKC(?=[A-Za-z]{0,80}\d)[A-Za-z0-9]{10,} | (?:AC|SK)(?=[a-z]{0,31}\d)[a-z0-9]{32}
    | pypi-AgE[\w-]{80,} | sq0csp-[\w\\-]{43} | [rs]k_live_[0-9a-zA-Z]{24}
    | AccountKey=[a-zA-Z0-9+/=]{88} | xox[abposr]-(?>(?:\d+-)+)[a-z0-9]+""",
    re.VERBOSE,
)
# user:password@, and TOKEN@ where it is no name of a user. Behind a colon a number is a port; behind the @ a
# digest is that of an image.
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


def _hide(found: re.Match[str]) -> str:
    """Hide all of it, or what stands behind its first group."""
    if not found.re.groups:
        return REDACTED
    return found[0] if is_placeholder(found[2], PASSWORD) else found[1] + REDACTED


def _url_user(found: re.Match[str]) -> str:
    """Hide the user of `https://TOKEN@host`, not that of `ssh://git@host`."""
    scheme = found.string[max(0, found.start() - 8) : found.start()].lower()
    is_web = scheme.endswith(("http://", "https://"))
    is_token = looks_random(found[1], 8 if is_web else 16) or (is_web and len(found[1]) >= 16)
    return REDACTED if is_token and not is_placeholder(found[1], PASSWORD) else found[0]


def _wandb_key(found: re.Match[str]) -> str:
    return found[0] if _COMMIT.search(found[1]) else found[1] + REDACTED


def _basic(found: re.Match[str]) -> str:
    try:
        is_pair = b":" in base64.b64decode(found[2] + "=" * (-len(found[2]) % 4), validate=True)
    except ValueError:
        is_pair = False
    return found[1] + REDACTED if is_pair else found[0]


def _element(found: re.Match[str]) -> str:
    is_secret = strength_of(found[1]) >= SECRET and not is_placeholder(found[2], PASSWORD)
    return f"<{found[1]}>{REDACTED}</" if is_secret else found[0]


_TABLE: list[tuple[str, str, Callable[[re.Match[str]], str]]] = [
    ("://", _URL_PATH, _hide),
    ("://", _URL_PASSWORD, _hide),
    ("://", r"(?<=://)([^\s/:@\[\]\"'<>?#]{1,512}+)(?=@)", _url_user),
    ("jdbc:oracle", r"(?<=jdbc:oracle:thin:)[^\s/@]{1,128}/[^\s@]{1,256}(?=@)", _hide),
    # W&B's older keys look as git's names of commits do: only next to that name.
    ("wandb", r"(?i)(?<=wandb)(\W[^\n]{0,40}?)\b[0-9a-f]{40}\b", _wandb_key),
    ("-us", r"[0-9a-z]{32}-us[0-9]{1,2}", _hide),
    ("Basic ", r"(\bBasic[ \t]+)([A-Za-z0-9+/]{6,}={0,2})", _basic),
    ("uthorization", _AUTHORIZATION, _hide),
    ("UTHORIZATION", _AUTHORIZATION, _hide),
    ("earer ", _BEARER, _hide),
    ("EARER ", _BEARER, _hide),
    # Programs that take a password as a bare argument.
    ("curl", r"(\bcurl\b[^\n]{0,300}?\s(?:-u|--user|-U|--proxy-user)[ =]?[\"']?[^\s:\"']+:)(\S+)", _hide),
    ("docker", r"(\bdocker\b[^\n]{0,300}?\s-p[ ]?[\"']?)([^\s\"':]+)(?=[\"']?(?:\s|$))", _hide),
    ("sshpass", r"(\bsshpass\s+-p[ ]?[\"']?)([^\s\"']+)", _hide),
    ("mysql", r"(\bmysql\w*[^\n]{0,300}?\s-p[\"']?)([^\s\"']+)", _hide),
    (" password ", r"(\b(?:login|machine|account)[ \t]+\S{1,256}\s+password[ \t]+)(\S+)", _hide),
    ("auth=(", r"(\bauth=\(\s*[\"'][^\"'\n]{0,256}[\"'],\s*[\"'])([^\"'\n]{1,256})", _hide),
    ("ass", _PASSWORD_IN_A_SENTENCE, _hide),
    (" ", _TOKEN_IN_A_SENTENCE, _hide),
    ("</", r"<([A-Za-z][\w.-]{0,80})>([^<>\n]{1,512})</", _element),
]
"""What a text has if it has such a secret; its expression; what takes its place."""
_COMPILED = [(mark, re.compile(expression), replacement) for mark, expression, replacement in _TABLE]
# name = value, "name": value, ['name'] = value, --name value; what follows is looked at by _secret_behind.
_NAMING = re.compile(
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
    """Return the text with secrets replaced; a text without any is returned as it is."""
    if "PRIVATE KEY" in text or "Private-" in text:
        text = _PRIVATE_KEY.sub(REDACTED, text)
    text = _FORMS.sub(REDACTED, text)
    text = _INSIDE.sub(REDACTED, text)
    if (values := _values_in_environment()) is not None:
        text = values.sub(REDACTED, text)
    for mark, expression, replacement in _COMPILED:
        if mark in text:
            text = expression.sub(replacement, text)
    return _redact_assignments(text)


def redact(tree: Any, name: str = "") -> Any:
    """Return dicts, lists and tuples of plain values with secrets replaced; other objects stay as they are.

    Args:
        name: Field that holds the tree.
    """
    if isinstance(tree, dict):
        named = tree.get("name", tree.get("key"))
        if isinstance(named, str) and "value" in tree:  # an entry of a list of variables
            return {key: redact(value, named if key == "value" else "") for key, value in tree.items()}
        return {_key(key): redact(value, _inherited(str(key), name)) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        before = ["", *tree]  # the word after --token
        entries = (
            REDACTED if _is_option_value(option, value) else redact(value, name)
            for option, value in zip(before, tree, strict=False)
        )
        return [*entries] if isinstance(tree, list) else tuple(entries)
    strength = strength_of(name) if name else 0
    if isinstance(tree, (int, float)) and not isinstance(tree, bool):
        return REDACTED if strength == PASSWORD else tree
    if not isinstance(tree, str):
        return tree
    return REDACTED if _is_secret_field(tree, strength, name) else redact_text(tree)


def declare_secret_variable(name: str) -> None:
    """Hide the value of this environment variable from now on, whatever its name says."""
    _declared_variables.add(name)


def _key(key: Any) -> Any:
    return redact_text(key) if isinstance(key, str) else key


def _inherited(name: str, parent: str) -> str:
    """Return the name that decides: `secrets: {a: x}` hides x; `auth: {user: x, password: y}` hides y."""
    is_collection = parent and parent.lower().endswith(
        ("secrets", "credentials", "passwords", "keys", "tokens")
    )
    return parent if is_collection and strength_of(parent) and not strength_of(name) else name


def _is_option_value(option: Any, value: Any) -> bool:
    if not (isinstance(option, str) and option.startswith("--") and isinstance(value, str)):
        return False
    strength = strength_of(option[2:])
    return strength > 0 and not value.startswith("-") and not is_placeholder(value, strength)


def _is_secret_field(value: str, strength: int, name: str) -> bool:
    if "wandb" in name.lower() and re.fullmatch(r"[0-9a-f]{40}", value):
        return True
    if not strength or is_placeholder(value, strength):
        return False
    if strength == UNCERTAIN:
        return len(value) >= 8 if name.lower() != "token" else looks_random(value, 8) or len(value) >= 20
    return True


def _values_in_environment() -> re.Pattern[str] | None:
    return _pattern_of(frozenset(os.environb.items()), frozenset(_declared_variables))


@lru_cache(maxsize=4)
def _pattern_of(
    environment: Iterable[tuple[bytes, bytes]], declared: frozenset[str]
) -> re.Pattern[str] | None:
    """Return an expression for the values of secret variables as they are, quoted, and in base64."""
    forms = set[str]()
    for raw_name, raw_value in environment:
        name, value = os.fsdecode(raw_name), os.fsdecode(raw_value).strip()
        if name not in declared and not is_secret_variable(name, value):
            continue
        written = {
            value,
            json.dumps(value)[1:-1],
            json.dumps(value, ensure_ascii=False)[1:-1],
            repr(value)[1:-1],
        }
        written |= {call(value, errors="replace") for call in (quote, quote_plus)}
        written.add(quote(value, safe="", errors="replace"))
        written.add(base64.b64encode(raw_value.strip()).decode().rstrip("="))
        # A short value may be a part of a word.
        is_short = len(value) < 12 or not looks_random(value, 12)
        edges = (r"(?<![^\W_])", r"(?![^\W_])") if is_short else ("", "")
        forms |= {f"{edges[0]}{re.escape(form)}{edges[1]}" for form in written}
    return re.compile("|".join(sorted(forms, key=len, reverse=True))) if forms else None


def _redact_assignments(text: str) -> str:
    parts, done, looked_at = list[str](), 0, 0
    lowered = text.lower()
    for hit in _NAMING.finditer(lowered if len(lowered) == len(text) else text):
        if hit.start() < looked_at:
            continue
        start = hit.start()
        while start > max(looked_at, hit.start() - 80) and (
            text[start - 1].isalnum() or text[start - 1] in "_-"
        ):
            start -= 1
        found = _NAME.match(text, start)
        looked_at = hit.end() if found is None else found.end("name")
        if found is None or not (strength := strength_of(found["name"])):
            continue
        if (span := _secret_behind(text, found, strength)) is not None:
            parts += [text[done : span[0]], REDACTED]
            done = looked_at = span[1]
    return "".join([*parts, text[done:]]) if parts else text


def _secret_behind(text: str, found: re.Match[str], strength: int) -> tuple[int, int] | None:
    """Return where the secret behind a name begins and ends."""
    separator, start = found["separator"].strip(), found.end()
    is_option = len(found["dashes"]) == 2
    if not separator and not is_option:
        return None
    if (opening := _QUOTED.match(text, start)) is not None:
        quote_, start = opening[1], opening.end()
        end = text.find(quote_, start, start + LONGEST_VALUE)
        while end > 0 and len(quote_) == 1 and text[end - 1] == "\\" and text[end - 2] != "\\":
            end = text.find(quote_, end + 1, start + LONGEST_VALUE)
        if end > start and "\n" not in text[start:end]:
            value = text[start:end]
            is_pair = separator != "," or (found["close"] and (is_option or looks_random(value, 4)))
            return (start, end) if is_pair and _is_quoted_secret(value, strength, found["name"]) else None
    if separator == "," or (bare := _BARE.match(text, start)) is None:
        return None
    value = bare[0].rstrip(").]}:!?>`\\")
    return (start, start + len(value)) if _is_bare_secret(text, found, value, strength) else None


def _is_quoted_secret(value: str, strength: int, name: str) -> bool:
    if is_placeholder(value, strength):
        return False
    if strength > UNCERTAIN:
        return True
    return looks_random(value, 8) or (name.lower() != "token" and len(value) >= 8 and " " not in value)


def _is_bare_secret(text: str, found: re.Match[str], value: str, strength: int) -> bool:
    """Tell a value from prose and code: `password: hunter2` from "password: see below" and `token = f(x)`."""
    separator, end = found["separator"], found.end() + len(value)
    name = found["name"]
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
    before = text[found.start() - 1 : found.start()]
    if before in ("?", "&"):  # a parameter of a URL
        return True
    if separator == "=":
        is_typed = len(found["dashes"]) == 2 or name.isupper()
        return strength == PASSWORD or (len(value) >= 4 and (strength == SECRET or is_typed))
    is_long = strength == PASSWORD or (strength == SECRET and len(value) >= 16)
    return is_long and is_alone and not is_placeholder(value, SECRET)
