//! Where a store is: an address that may list several hosts and never shows its password.

use std::{fmt, net::Ipv6Addr, str::FromStr, sync::Arc};

use crate::error::{Error, ErrorKind, Result};

/// The address of a store, as files and command lines write it.
///
/// # Shape
/// `scheme://[user[:password]@]host[:port][,host[:port]…][/path][?key=value[&key=value]…]`
///
/// Hosts are names, IPv4 addresses, or IPv6 addresses in brackets. A store that is a file or a socket has no host:
/// `sqlite:///var/lib/shop/locks.db`, `redis+unix:///run/redis.sock`. Inside user, password, path and query, `%40`
/// stands for `@`, and so on. Everything is returned decoded. Two addresses are equal when their parts are.
///
/// The password is kept out of `Debug`, `Display` and all errors; only the methods called `expose_…` return it. A
/// query value whose key speaks of a password or a secret is hidden, too.
///
/// # Source
/// RFC 3986, but for the list of hosts, which it does not know.
///
/// # Example
/// ```
/// use lockcore::StoreUrl;
///
/// let url = StoreUrl::parse("etcds://locks:s3cret@etcd-1:2379,etcd-2,[::1]:2379/shop?ca=/etc/ca.pem")?;
/// assert_eq!(url.scheme(), "etcds");
/// assert_eq!(url.hosts().collect::<Vec<_>>(), [("etcd-1", Some(2379)), ("etcd-2", None), ("::1", Some(2379))]);
/// assert_eq!(url.path(), "/shop");
/// assert_eq!(url.query("ca"), Some("/etc/ca.pem"));
/// assert_eq!(url.to_string(), "etcds://locks:***@etcd-1:2379,etcd-2,[::1]:2379/shop?ca=/etc/ca.pem");
/// # Ok::<(), lockcore::Error>(())
/// ```
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct StoreUrl(Arc<Parts>);

#[derive(PartialEq, Eq, Hash)]
struct Parts {
    scheme: String,
    user: Option<String>,
    password: Option<String>,
    hosts: Vec<(String, Option<u16>)>,
    path: String,
    queries: Vec<(String, String)>,
}

impl StoreUrl {
    /// Reads an address; names the part that is wrong, and never repeats what may be a password.
    ///
    /// # Errors
    /// `Invalid`, with what would be right.
    pub fn parse(text: &str) -> Result<Self> {
        if let Some(c) = text.chars().find(|c| c.is_control() || c.is_whitespace()) {
            return Err(invalid(format!("a store's URL has the character {c:?}; write it percent-encoded")));
        }
        let Some((scheme, rest)) = text.split_once("://") else {
            return Err(invalid(
                "a store's URL begins with a scheme and ://, like redis://localhost:6379 or sqlite:///abs/locks.db",
            ));
        };
        let scheme = parse_scheme(scheme)?;
        if rest.contains('#') {
            return Err(invalid(
                "a store's URL has no fragment; inside a password or a path, write # as %23",
            ));
        }

        let authority_end = rest.find(['/', '?']).unwrap_or(rest.len());
        let (authority, tail) = rest.split_at(authority_end);
        let (path, query) = tail.split_once('?').unwrap_or((tail, ""));
        // A raw `/` or `?` in a password ends the authority early, and the rest of the password would pass for a path.
        // Nothing after a host needs a raw `@`, so one there is taken for that mistake.
        if !authority.is_empty() && tail.contains('@') {
            return Err(invalid(
                "a store's URL has an @ behind the host; inside a user name or password write / as %2F and ? as %3F, \
                 and elsewhere @ as %40",
            ));
        }
        let (userinfo, hosts) = match authority.split_once('@') {
            Some((userinfo, hosts)) => (Some(userinfo), hosts),
            None => (None, authority),
        };
        if hosts.contains('@') {
            return Err(invalid(
                "a store's URL has more than one @; user and password stand once, before the first host, and an @ \
                 inside them is written %40",
            ));
        }
        if is_sqlite(&scheme) {
            check_sqlite(&scheme, authority, path)?;
        }
        let (user, password) = parse_userinfo(userinfo)?;
        let hosts = parse_hosts(hosts, userinfo.is_some())?;
        let path = decode(path, "path")?;
        let queries = parse_queries(query)?;
        Ok(Self(Arc::new(Parts { scheme, user, password, hosts, path, queries })))
    }

    /// Returns the scheme, in lower case.
    pub fn scheme(&self) -> &str {
        &self.0.scheme
    }

    /// Returns the user.
    pub fn user(&self) -> Option<&str> {
        self.0.user.as_deref()
    }

    /// Says whether the address carries a secret: a password, or a query value that is called one.
    pub fn has_secret(&self) -> bool {
        self.0.password.is_some() || self.0.queries.iter().any(|(key, _)| is_secret(key))
    }

    /// Returns the password: for a connector, never for a message.
    pub fn expose_password(&self) -> Option<&str> {
        self.0.password.as_deref()
    }

    /// Returns the whole address with its password, for a client library that takes one.
    pub fn expose_text(&self) -> String {
        self.text(false)
    }

    /// Lists hosts and ports, in order; IPv6 addresses without brackets.
    pub fn hosts(&self) -> impl ExactSizeIterator<Item = (&str, Option<u16>)> {
        self.0.hosts.iter().map(|(host, port)| (host.as_str(), *port))
    }

    /// Returns the path with its first slash, or nothing.
    pub fn path(&self) -> &str {
        &self.0.path
    }

    /// Returns one query value.
    pub fn query(&self, key: &str) -> Option<&str> {
        self.0.queries.iter().find(|(k, _)| k == key).map(|(_, value)| value.as_str())
    }

    /// Lists the query, in order.
    pub fn queries(&self) -> impl ExactSizeIterator<Item = (&str, &str)> {
        self.0.queries.iter().map(|(key, value)| (key.as_str(), value.as_str()))
    }

    fn text(&self, hide: bool) -> String {
        let Parts { scheme, user, password, hosts, path, queries } = &*self.0;
        let mut text = format!("{scheme}://");
        if user.is_some() || password.is_some() {
            encode(user.as_deref().unwrap_or_default(), USERINFO, &mut text);
            if let Some(password) = password {
                text.push(':');
                if hide { text.push_str("***") } else { encode(password, USERINFO, &mut text) }
            }
            text.push('@');
        }
        for (i, (host, port)) in hosts.iter().enumerate() {
            let comma = if i > 0 { "," } else { "" };
            let (open, close) = if host.contains(':') { ("[", "]") } else { ("", "") };
            text += &format!("{comma}{open}{host}{close}");
            if let Some(port) = port {
                text += &format!(":{port}");
            }
        }
        encode(path, PATH, &mut text);
        for (i, (key, value)) in queries.iter().enumerate() {
            text.push(if i > 0 { '&' } else { '?' });
            encode(key, QUERY, &mut text);
            text.push('=');
            if hide && is_secret(key) { text.push_str("***") } else { encode(value, QUERY, &mut text) }
        }
        text
    }
}

fn parse_scheme(scheme: &str) -> Result<String> {
    let well_formed = scheme.starts_with(|c: char| c.is_ascii_alphabetic())
        && scheme.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '+' | '-' | '.'));
    match well_formed {
        true => Ok(scheme.to_ascii_lowercase()),
        // Not repeated: whoever left the scheme out may have begun with the password.
        false => {
            Err(invalid("the scheme of a store's URL is made of letters, digits, + - and ., like redis://"))
        }
    }
}

fn parse_userinfo(userinfo: Option<&str>) -> Result<(Option<String>, Option<String>)> {
    let Some(userinfo) = userinfo else { return Ok((None, None)) };
    let (user, password) = match userinfo.split_once(':') {
        Some((user, password)) => (user, Some(password)),
        None => (userinfo, None),
    };
    if password.is_some_and(|p| p.contains(':')) {
        return Err(invalid("the password of a store's URL has a colon; write it as %3A"));
    }
    let user = decode(user, "user")?;
    let password = password.map(|p| decode(p, "password")).transpose()?;
    let nothing = user.is_empty() && password.as_deref().unwrap_or_default().is_empty();
    if nothing {
        return Err(invalid("a store's URL has an @, but neither a user nor a password before it"));
    }
    Ok((Some(user).filter(|u| !u.is_empty()), password.filter(|p| !p.is_empty())))
}

fn parse_hosts(hosts: &str, required: bool) -> Result<Vec<(String, Option<u16>)>> {
    if hosts.is_empty() {
        return match required {
            true => Err(invalid("a store's URL has a user but no host")),
            false => Ok(Vec::new()),
        };
    }
    hosts.split(',').enumerate().map(|(i, host)| parse_host(host, i + 1)).collect()
}

// A host that is wrong is not repeated in the message: with a raw `/` in the password, the text up to it stands here.
fn parse_host(text: &str, number: usize) -> Result<(String, Option<u16>)> {
    let (host, port) = if let Some(rest) = text.strip_prefix('[') {
        let Some((address, after)) = rest.split_once(']') else {
            return Err(invalid(format!("host {number} of a store's URL has a [ without its ]")));
        };
        if address.parse::<Ipv6Addr>().is_err() {
            return Err(invalid(format!("host {number} of a store's URL is not an IPv6 address")));
        }
        match after.strip_prefix(':') {
            Some(port) => (address, Some(port)),
            None if after.is_empty() => (address, None),
            None => {
                return Err(invalid(format!("host {number} of a store's URL has something between ] and :")));
            }
        }
    } else {
        if text.matches(':').count() > 1 {
            return Err(invalid(format!(
                "host {number} of a store's URL has several colons; an IPv6 address is written in brackets, like \
                 [::1]:6379"
            )));
        }
        let (host, port) = match text.split_once(':') {
            Some((host, port)) => (host, Some(port)),
            None => (text, None),
        };
        if host.is_empty() {
            return Err(invalid(format!("host {number} of a store's URL is empty")));
        }
        let strange = |c: char| !(c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_'));
        if host.contains(strange) {
            return Err(invalid(format!(
                "host {number} of a store's URL is not a name or an address: letters, digits, . - and _ only"
            )));
        }
        (host, port)
    };
    let port = port.map(|port| parse_port(port, number)).transpose()?;
    Ok((host.to_owned(), port))
}

fn parse_port(text: &str, number: usize) -> Result<u16> {
    let digits = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    match text.parse::<u16>() {
        Ok(port) if port > 0 && digits => Ok(port),
        _ => Err(invalid(format!(
            "the port of host {number} of a store's URL is not a number from 1 to 65535; if that is a password, it \
             needs an @ behind it, and / # ? : @ inside it percent-encoded"
        ))),
    }
}

fn parse_queries(query: &str) -> Result<Vec<(String, String)>> {
    let mut queries: Vec<(String, String)> = Vec::new();
    for pair in query.split('&').filter(|pair| !pair.is_empty()) {
        let Some((key, value)) = pair.split_once('=') else {
            return Err(invalid(
                "a query of a store's URL has a key without a value; write ?key=value&key=value",
            ));
        };
        let key = decode(key, "query")?;
        let value = decode(value, "query")?;
        if key.is_empty() {
            return Err(invalid(
                "a query of a store's URL has a value without a key; write ?key=value&key=value",
            ));
        }
        if queries.iter().any(|(k, _)| *k == key) {
            return Err(invalid(format!("the query of a store's URL has {key:?} twice")));
        }
        queries.push((key, value));
    }
    Ok(queries)
}

fn is_sqlite(scheme: &str) -> bool {
    scheme == "sqlite"
}

// A file is the one store whose address people write relative. `sqlite://x.db` would make `x.db` a host, and a
// relative path means another file in cron's directory than in the shell's.
fn check_sqlite(scheme: &str, authority: &str, path: &str) -> Result<()> {
    if !authority.is_empty() {
        let file = format!("{}{path}", authority.rsplit('@').next().unwrap_or_default());
        return Err(invalid(format!(
            "{scheme}://{file} makes {file:?} a host; a file has three slashes and an absolute path, like \
             {scheme}:///var/lib/{}",
            file.rsplit('/').find(|part| !part.is_empty()).unwrap_or("locks.db"),
        )));
    }
    if path.trim_matches('/').is_empty() {
        return Err(invalid(format!(
            "{scheme}:// names no file; write three slashes and an absolute path, like {scheme}:///var/lib/locks.db"
        )));
    }
    Ok(())
}

/// Says whether a value under this key is a secret, by the key's name.
pub(crate) fn is_secret(key: &str) -> bool {
    let key = key.to_ascii_lowercase();
    // A file or a variable that holds the secret is not one.
    let names_a_place = key.ends_with("file") || key.ends_with("env");
    !names_a_place && ["password", "passwd", "secret", "token"].iter().any(|word| key.contains(word))
}

// What need not be encoded in each part; letters, digits and all that is not ASCII stand for themselves, too.
const USERINFO: &str = "-._~!$&'()*+;=";
const PATH: &str = "-._~!$&'()*+,;=:/";
const QUERY: &str = "-._~!$'()*+,;:/";

fn encode(part: &str, plain: &str, into: &mut String) {
    for c in part.chars() {
        let stands = c.is_ascii_alphanumeric() || plain.contains(c);
        let readable = !c.is_ascii() && !c.is_control() && !c.is_whitespace();
        if stands || readable {
            into.push(c);
        } else {
            for byte in c.encode_utf8(&mut [0; 4]).bytes() {
                *into += &format!("%{byte:02X}");
            }
        }
    }
}

fn decode(part: &str, what: &str) -> Result<String> {
    let mut bytes = Vec::with_capacity(part.len());
    let mut rest = part.as_bytes();
    while let [first, tail @ ..] = rest {
        rest = tail;
        if *first != b'%' {
            bytes.push(*first);
            continue;
        }
        let digit = |at: usize| tail.get(at).and_then(|b| char::from(*b).to_digit(16));
        let (Some(high), Some(low)) = (digit(0), digit(1)) else {
            return Err(invalid(format!(
                "the {what} of a store's URL has a % without two hex digits; a percent sign is written %25"
            )));
        };
        bytes.push((high * 16 + low) as u8);
        rest = &tail[2..];
    }
    if bytes.contains(&0) {
        return Err(invalid(format!("the {what} of a store's URL has a zero byte")));
    }
    String::from_utf8(bytes).map_err(|_| invalid(format!("the {what} of a store's URL is not UTF-8")))
}

fn invalid(message: impl Into<std::borrow::Cow<'static, str>>) -> Error {
    Error::new(ErrorKind::Invalid, message)
}

impl fmt::Display for StoreUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text(true))
    }
}

impl fmt::Debug for StoreUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.text(true))
    }
}

impl FromStr for StoreUrl {
    type Err = Error;
    fn from_str(text: &str) -> Result<Self> {
        Self::parse(text)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn parse(text: &str) -> StoreUrl {
        StoreUrl::parse(text).unwrap_or_else(|e| panic!("{text}: {e}"))
    }

    #[test]
    fn every_part_is_returned_decoded() {
        let url = parse(
            "Redis+Sentinel://us%40er:p%2Fw%23@s-1,s_2:26379,10.0.0.1,[fe80::1]:7/shop%20a?x=%26&y=b+c",
        );
        assert_eq!(url.scheme(), "redis+sentinel");
        assert_eq!(url.user(), Some("us@er"));
        assert_eq!(url.expose_password(), Some("p/w#"));
        assert_eq!(
            url.hosts().collect::<Vec<_>>(),
            [("s-1", None), ("s_2", Some(26379)), ("10.0.0.1", None), ("fe80::1", Some(7))]
        );
        assert_eq!(url.path(), "/shop a");
        assert_eq!(url.queries().collect::<Vec<_>>(), [("x", "&"), ("y", "b+c")]);
        assert_eq!(url.query("z"), None);
    }

    #[test]
    fn files_and_sockets_have_no_host() {
        for (text, path) in [
            ("sqlite:///var/lib/shop/locks.db", "/var/lib/shop/locks.db"),
            ("sqlite:///home/me@work/l%C3%B6cks.db", "/home/me@work/löcks.db"),
            ("redis+unix:///run/redis.sock", "/run/redis.sock"),
            ("memory://", ""),
        ] {
            let url = parse(text);
            assert_eq!((url.hosts().len(), url.path()), (0, path), "{text}");
        }
    }

    #[test]
    fn addresses_of_the_stores_are_read() {
        for text in [
            "postgres://db/locks",
            "redis://redis-a:6379/0",
            "rediss://:secret@h",
            "redis+cluster://h1,h2",
            "redlock://h1,h2,h3",
            "etcd://h1:2379,h2:2379",
            "etcds://etcd-1,etcd-2,etcd-3",
            "zk://h1,h2/chroot",
            "memory://",
            "memory://name",
        ] {
            assert_eq!(parse(text).expose_text(), text);
        }
    }

    #[test]
    fn the_part_that_is_wrong_is_named() {
        for (text, says) in [
            ("", "begins with a scheme"),
            ("localhost:6379", "begins with a scheme"),
            ("sqlite:/var/x.db", "sqlite:///abs/locks.db"),
            ("://h", "the scheme"),
            ("1redis://h", "the scheme"),
            ("re dis://h", "percent-encoded"),
            ("redis://h\n", "'\\n'"),
            ("redis://h#1", "%23"),
            ("redis://h1,,h2", "host 2"),
            ("redis://h1,", "host 2"),
            ("redis://:6379", "host 1"),
            ("redis://h:0", "port of host 1"),
            ("redis://h:65536", "port of host 1"),
            ("redis://h1,h:", "port of host 2"),
            ("redis://h:+1", "port of host 1"),
            ("redis://::1", "in brackets"),
            ("redis://[::1", "without its ]"),
            ("redis://[::1]6379", "between ] and :"),
            ("redis://[nope]", "IPv6"),
            ("redis://h%41", "host 1"),
            ("redis://ü", "host 1"),
            ("redis://@h", "neither a user nor a password"),
            ("redis://me@", "no host"),
            ("redis://a@h1,b@h2", "more than one @"),
            ("redis://h/p%zz", "the path"),
            ("redis://h/%00", "zero byte"),
            ("redis://h/%ff", "not UTF-8"),
            ("redis://h?x", "key without a value"),
            ("redis://h?=x", "value without a key"),
            ("redis://h?x=1&x=2", "\"x\" twice"),
        ] {
            let error = StoreUrl::parse(text).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Invalid, "{text}");
            assert!(error.to_string().contains(says), "{text}: {error}");
        }
    }

    #[test]
    fn a_relative_file_is_refused_with_the_three_slash_form() {
        for (text, right) in [
            ("sqlite://x.db", "sqlite:///var/lib/x.db"),
            ("sqlite://data/x.db", "sqlite:///var/lib/x.db"),
            ("sqlite://./x.db?busy=1s", "sqlite:///var/lib/x.db"),
            ("sqlite://", "sqlite:///var/lib/locks.db"),
            ("sqlite:///", "sqlite:///var/lib/locks.db"),
        ] {
            let error = StoreUrl::parse(text).unwrap_err().to_string();
            assert!(error.contains("three slashes") && error.contains(right), "{text}: {error}");
        }
        let error = StoreUrl::parse("sqlite://x.db").unwrap_err().to_string();
        assert!(error.contains("makes \"x.db\" a host"), "{error}");
    }

    #[test]
    fn a_password_is_never_shown() {
        let url = parse("redis://me:hunter2@h/0?tls-password=hunter2&password-file=/run/x");
        for shown in [url.to_string(), format!("{url:?}"), format!("{url:#?}")] {
            assert!(!shown.contains("hunter2"), "{shown}");
            assert!(shown.contains("redis://me:***@h/0?tls-password=***&password-file=/run/x"), "{shown}");
        }
        assert!(url.has_secret());
        assert!(!parse("redis://me@h/0?password-file=/run/x").has_secret());
        // However a password is misspelt, the error does not repeat it.
        for text in [
            "redis://me:hun/ter2@h/0",
            "redis://me:hun?ter2@h/0",
            "redis://me:hun#ter2@h/0",
            "redis://me:hun@ter2@h/0",
            "redis://me:hun:ter2@h/0",
            "redis://me:hun ter2@h/0",
            "redis://me:hun%ter2@h/0",
            "redis://me:12/ter2@h/0",
            "redis://me:p@s/ter2@h/0",
            "redis://me:p@s?ter2@h/0",
            "redis://hun:ter2",
            "hunter2@redis://h",
            "me:hunter2@h",
            "sqlite://me:hun@ter2@h",
            "sqlite://me:hunter2@x.db",
        ] {
            let error = format!("{:?}", StoreUrl::parse(text).unwrap_err());
            assert!(!error.contains("hun") && !error.contains("ter2"), "{text}: {error}");
        }
    }

    fn part() -> impl Strategy<Value = String> {
        "[ -~é]{1,8}"
    }

    prop_compose! {
        fn any_url()(
            scheme in "[a-z][a-z0-9+.-]{0,6}",
            user in proptest::option::of(part()),
            password in proptest::option::of(part()),
            hosts in proptest::collection::vec(
                ("[a-z0-9._-]{1,6}|[a-f0-9]{1,4}::[a-f0-9]{1,4}", proptest::option::of(1u16..)), 1..4),
            path in proptest::option::of(part()),
            queries in proptest::collection::btree_map(part(), part(), 0..3),
        ) -> StoreUrl {
            StoreUrl(Arc::new(Parts {
                scheme: if is_sqlite(&scheme) { "redis".into() } else { scheme },
                user,
                password,
                hosts,
                path: path.map(|p| format!("/{p}")).unwrap_or_default(),
                queries: queries.into_iter().collect(),
            }))
        }
    }

    proptest! {
        #[test]
        fn what_is_written_is_read_back(url in any_url()) {
            prop_assert_eq!(StoreUrl::parse(&url.expose_text()).unwrap(), url);
        }

        #[test]
        fn no_text_makes_the_reader_panic(text in "\\PC*|[a-z]{0,6}(://)?[a-z0-9@:/?#%,=&. \\[\\]\u{e9}-]*") {
            if let Ok(url) = StoreUrl::parse(&text) {
                prop_assert_eq!(&StoreUrl::parse(&url.expose_text()).unwrap(), &url);
            }
        }

        #[test]
        fn a_password_shows_nowhere(mut secret in "[A-Z]{6,9}", cut in 0usize..6, c in "[/?#@:% ,\\[\\]=&]") {
            // Letters that no message has, with one character in the middle that should have been encoded.
            secret.insert_str(cut, &c);
            let text = format!("redis://me:{secret}@host/0");
            let shown = match StoreUrl::parse(&text) {
                Ok(url) => format!("{url} {url:?}"),
                Err(error) => format!("{error} {error:?}"),
            };
            for half in secret.split(c.chars().next().unwrap()).filter(|half| half.len() > 4) {
                prop_assert!(!shown.contains(half), "{}", shown);
            }
        }
    }
}
