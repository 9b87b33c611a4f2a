//! How one store is reached, as a file says it and as a connector reads it.

use std::{
    collections::BTreeMap,
    ffi::OsString,
    fmt,
    path::{Path, PathBuf},
    time::Duration,
};

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use super::listed;
use crate::{
    error::{Error, ErrorKind, Result},
    text::parse_duration,
    url::{self, StoreUrl},
};

/// How one store is reached. In a file: a URL, or a table with a URL.
///
/// Whatever only one family of stores knows stands in `options` or in the URL's query, and is checked by that family's
/// connector; lockcore knows no Redis words.
///
/// # Example
/// ```
/// use lockcore::config::{BackendConfig, StoreUrl};
///
/// let config = BackendConfig::new(StoreUrl::parse("sqlite:///var/lib/shop/locks.db?busy-timeout=5s")?);
/// let mut options = config.options()?;
/// assert_eq!(options.duration("busy-timeout")?, Some(std::time::Duration::from_secs(5)));
/// options.finish()?;
/// # Ok::<(), lockcore::Error>(())
/// ```
#[derive(Clone, PartialEq)]
#[non_exhaustive]
pub struct BackendConfig {
    /// Where the store is.
    pub url: StoreUrl,
    /// Who we are there; or in the URL.
    pub user: Option<String>,
    /// A file that holds the password, and perhaps a newline behind it. Absolute, or one name below
    /// `$CREDENTIALS_DIRECTORY`.
    pub password_file: Option<PathBuf>,
    /// An environment variable that holds the password.
    pub password_env: Option<String>,
    /// What only this family of stores has.
    pub options: BTreeMap<String, OptionValue>,
}

impl BackendConfig {
    /// Starts from an address.
    pub fn new(url: StoreUrl) -> Self {
        Self { url, user: None, password_file: None, password_env: None, options: BTreeMap::new() }
    }

    /// Sets fields in one expression.
    #[must_use]
    pub fn with(mut self, set: impl FnOnce(&mut Self)) -> Self {
        set(&mut self);
        self
    }

    /// Reads user and password from wherever the configuration says they are.
    ///
    /// The file is read anew by every call, so that a connector which reconnects finds a changed password.
    ///
    /// # Errors
    /// `Misconfigured`: the file or the variable is missing, empty or not UTF-8. The secret is not repeated.
    pub fn credentials(&self) -> Result<Credentials> {
        self.credentials_with(|variable| std::env::var_os(variable))
    }

    fn credentials_with(&self, env: impl Fn(&str) -> Option<OsString>) -> Result<Credentials> {
        let user = self.user.clone().or_else(|| self.url.user().map(str::to_owned));
        let password = if let Some(file) = &self.password_file {
            Some(read_password(&password_path(file, env("CREDENTIALS_DIRECTORY"))?)?)
        } else if let Some(variable) = &self.password_env {
            let value = env(variable).ok_or_else(|| {
                misconfigured(format!("the variable {variable} is not set; password-env names it"))
            })?;
            let value = value.into_string().map_err(|_| {
                misconfigured(format!("the password in the variable {variable} is not UTF-8"))
            })?;
            Some(value)
        } else {
            self.url.expose_password().map(str::to_owned)
        };
        if password.as_deref() == Some("") {
            return Err(misconfigured("the password is empty; leave the key out where there is none"));
        }
        Ok(Credentials { user, password })
    }

    /// Starts reading options and the URL's query, which a connector treats alike.
    ///
    /// # Errors
    /// `Misconfigured`: a key stands in both.
    pub fn options(&self) -> Result<Options<'_>> {
        if let Some((key, _)) = self.url.queries().find(|(key, _)| self.options.contains_key(*key)) {
            return Err(misconfigured(format!("{key:?} stands in `options` and in the URL; once is enough")));
        }
        let query = self.url.queries().map(|(key, value)| (key, Given::Query(value)));
        let table = self.options.iter().map(|(key, value)| (key.as_str(), Given::Table(value)));
        Ok(Options { left: query.chain(table).collect(), known: Vec::new() })
    }

    fn is_url_alone(&self) -> bool {
        *self == Self::new(self.url.clone())
    }
}

fn password_path(file: &Path, credentials: Option<OsString>) -> Result<PathBuf> {
    if file.is_absolute() {
        return Ok(file.to_owned());
    }
    let one_name = file.components().count() == 1 && file.file_name().is_some();
    match credentials {
        Some(directory) if one_name => Ok(Path::new(&directory).join(file)),
        _ => Err(misconfigured(format!(
            "the password file {} is relative; write an absolute path, or one name where $CREDENTIALS_DIRECTORY is set",
            file.display()
        ))),
    }
}

fn read_password(path: &Path) -> Result<String> {
    let text = std::fs::read_to_string(path).map_err(|error| {
        misconfigured(format!("the password file {} cannot be read: {error}", path.display()))
    })?;
    let text = text.strip_suffix('\n').unwrap_or(&text);
    let text = text.strip_suffix('\r').unwrap_or(text);
    if text.is_empty() {
        return Err(misconfigured(format!("the password file {} is empty", path.display())));
    }
    Ok(text.to_owned())
}

impl fmt::Debug for BackendConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BackendConfig")
            .field("url", &self.url)
            .field("user", &self.user)
            .field("password_file", &self.password_file)
            .field("password_env", &self.password_env)
            .field("options", &self.shown_options())
            .finish()
    }
}

impl BackendConfig {
    fn shown_options(&self) -> BTreeMap<String, OptionValue> {
        let hide = |key: &str, value: &OptionValue| match url::is_secret(key) {
            true => OptionValue::Text("***".into()),
            false => value.clone(),
        };
        self.options.iter().map(|(key, value)| (key.clone(), hide(key, value))).collect()
    }
}

// The form of a file, behind the two short ones.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
struct Table {
    url: StoreUrl,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    user: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    password_file: Option<PathBuf>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    password_env: Option<String>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    options: BTreeMap<String, OptionValue>,
}

/// Writes what a person may see: secrets as `***`.
impl Serialize for BackendConfig {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if self.is_url_alone() {
            return self.url.serialize(serializer);
        }
        let Self { url, user, password_file, password_env, .. } = self.clone();
        Table { url, user, password_file, password_env, options: self.shown_options() }.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for BackendConfig {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(UrlOrTable)
    }
}

// By hand: `#[serde(untagged)]` would answer "did not match any variant" for every mistake, without line and key.
struct UrlOrTable;

impl<'de> de::Visitor<'de> for UrlOrTable {
    type Value = BackendConfig;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a store's URL, or a table with a `url`")
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<BackendConfig, E> {
        StoreUrl::parse(text).map(BackendConfig::new).map_err(|error| E::custom(error.message()))
    }

    fn visit_map<A: de::MapAccess<'de>>(self, map: A) -> Result<BackendConfig, A::Error> {
        let Table { url, user, password_file, password_env, options } =
            Table::deserialize(de::value::MapAccessDeserializer::new(map))?;
        Ok(BackendConfig { url, user, password_file, password_env, options })
    }
}

/// Writes what a person may see: the password as `***`.
impl Serialize for StoreUrl {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for StoreUrl {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Reader;
        impl de::Visitor<'_> for Reader {
            type Value = StoreUrl;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a store's URL")
            }
            fn visit_str<E: de::Error>(self, text: &str) -> Result<StoreUrl, E> {
                StoreUrl::parse(text).map_err(|error| E::custom(error.message()))
            }
        }
        deserializer.deserialize_str(Reader)
    }
}

/// User and password of one store. `Debug` does not show the password.
#[derive(Clone, PartialEq, Eq)]
pub struct Credentials {
    user: Option<String>,
    password: Option<String>,
}

impl Credentials {
    /// Returns the user.
    pub fn user(&self) -> Option<&str> {
        self.user.as_deref()
    }

    /// Returns the password: for a connector, never for a message.
    pub fn expose_password(&self) -> Option<&str> {
        self.password.as_deref()
    }
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Credentials")
            .field("user", &self.user)
            .field("password", &self.password.as_ref().map(|_| "***"))
            .finish()
    }
}

/// One value of `options`: text, a number, or yes and no.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(untagged)]
#[non_exhaustive]
pub enum OptionValue {
    /// Text; durations and sizes, too.
    Text(String),
    /// A whole number.
    Whole(i64),
    /// A number with a fraction.
    Fraction(f64),
    /// Yes or no.
    Flag(bool),
}

impl<'de> Deserialize<'de> for OptionValue {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Reader;
        impl de::Visitor<'_> for Reader {
            type Value = OptionValue;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("text, a number, true or false")
            }
            fn visit_str<E: de::Error>(self, text: &str) -> Result<OptionValue, E> {
                Ok(OptionValue::Text(text.to_owned()))
            }
            fn visit_i64<E: de::Error>(self, number: i64) -> Result<OptionValue, E> {
                Ok(OptionValue::Whole(number))
            }
            fn visit_u64<E: de::Error>(self, number: u64) -> Result<OptionValue, E> {
                i64::try_from(number)
                    .map(OptionValue::Whole)
                    .map_err(|_| E::invalid_value(de::Unexpected::Unsigned(number), &self))
            }
            fn visit_f64<E: de::Error>(self, number: f64) -> Result<OptionValue, E> {
                Ok(OptionValue::Fraction(number))
            }
            fn visit_bool<E: de::Error>(self, flag: bool) -> Result<OptionValue, E> {
                Ok(OptionValue::Flag(flag))
            }
        }
        deserializer.deserialize_any(Reader)
    }
}

#[derive(Clone, Copy, Debug)]
enum Given<'a> {
    Query(&'a str),
    Table(&'a OptionValue),
}

/// Reads the options of a store one by one; [`finish`](Self::finish) names what nobody asked for.
#[must_use = "call `finish`, or a misspelt option is accepted in silence"]
pub struct Options<'a> {
    left: BTreeMap<&'a str, Given<'a>>,
    known: Vec<&'static str>,
}

impl<'a> Options<'a> {
    fn take(&mut self, key: &'static str) -> Option<Given<'a>> {
        self.known.push(key);
        self.left.remove(key)
    }

    /// Reads text.
    ///
    /// # Errors
    /// `Misconfigured`, here and in the following: the option has another form; the message names it.
    pub fn text(&mut self, key: &'static str) -> Result<Option<String>> {
        match self.take(key) {
            None => Ok(None),
            Some(Given::Query(text)) => Ok(Some(text.to_owned())),
            Some(Given::Table(OptionValue::Text(text))) => Ok(Some(text.clone())),
            Some(Given::Table(_)) => Err(not_a(key, "text")),
        }
    }

    /// Reads a duration with a unit.
    pub fn duration(&mut self, key: &'static str) -> Result<Option<Duration>> {
        match self.take(key) {
            None => Ok(None),
            Some(Given::Query(text)) => read_duration(key, text).map(Some),
            Some(Given::Table(OptionValue::Text(text))) => read_duration(key, text).map(Some),
            Some(Given::Table(_)) => Err(not_a(key, "a duration with a unit, like \"30s\" or \"250ms\"")),
        }
    }

    /// Reads a whole number that is not negative.
    pub fn whole(&mut self, key: &'static str) -> Result<Option<u64>> {
        let number = match self.take(key) {
            None => return Ok(None),
            Some(Given::Query(text)) => text.parse().ok(),
            Some(Given::Table(OptionValue::Whole(number))) => u64::try_from(*number).ok(),
            Some(Given::Table(_)) => None,
        };
        number.map(Some).ok_or_else(|| not_a(key, "a whole number, zero or more"))
    }

    /// Reads yes or no.
    pub fn flag(&mut self, key: &'static str) -> Result<Option<bool>> {
        match self.take(key) {
            None => Ok(None),
            Some(Given::Query("true") | Given::Table(OptionValue::Flag(true))) => Ok(Some(true)),
            Some(Given::Query("false") | Given::Table(OptionValue::Flag(false))) => Ok(Some(false)),
            Some(_) => Err(not_a(key, "true or false")),
        }
    }

    /// Ends the reading.
    ///
    /// # Errors
    /// `Misconfigured`: an option that was not read is left; the message lists those that exist.
    pub fn finish(self) -> Result<()> {
        match self.left.keys().next() {
            None => Ok(()),
            Some(key) => Err(misconfigured(format!(
                "the option {key:?} is not known here; have {}",
                listed(self.known.iter().copied())
            ))),
        }
    }
}

// Values stay out: one of them may be a secret under a name that does not say so.
impl fmt::Debug for Options<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Options")
            .field("left", &self.left.keys().collect::<Vec<_>>())
            .field("known", &self.known)
            .finish()
    }
}

fn read_duration(key: &str, text: &str) -> Result<Duration> {
    parse_duration(text).map_err(|error| misconfigured(format!("the option {key:?}: {}", error.message())))
}

fn not_a(key: &str, what: &str) -> Error {
    misconfigured(format!("the option {key:?} is not {what}"))
}

fn misconfigured(message: impl Into<std::borrow::Cow<'static, str>>) -> Error {
    Error::new(ErrorKind::Misconfigured, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(url: &str) -> BackendConfig {
        BackendConfig::new(StoreUrl::parse(url).unwrap())
    }

    fn no_env(_: &str) -> Option<OsString> {
        None
    }

    #[test]
    fn a_password_comes_from_a_file_a_variable_or_the_url() {
        let folder = std::env::temp_dir().join(format!("lockcore-credentials-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let file = folder.join("password");
        std::fs::write(&file, "hun ter2\r\n").unwrap();

        let from_file = config("etcd://h").with(|c| {
            c.user = Some("me".into());
            c.password_file = Some(file.clone());
        });
        let credentials = from_file.credentials_with(no_env).unwrap();
        assert_eq!((credentials.user(), credentials.expose_password()), (Some("me"), Some("hun ter2")));
        assert!(!format!("{credentials:?}").contains("hun"), "{credentials:?}");

        let named = config("etcd://h").with(|c| c.password_file = Some("password".into()));
        let systemd = |v: &str| (v == "CREDENTIALS_DIRECTORY").then(|| folder.clone().into_os_string());
        assert_eq!(named.credentials_with(systemd).unwrap().expose_password(), Some("hun ter2"));
        let error = named.credentials_with(no_env).unwrap_err();
        assert!(error.to_string().contains("is relative"), "{error}");

        let from_env = config("etcd://h").with(|c| c.password_env = Some("LOCKS_PASSWORD".into()));
        let env = |v: &str| (v == "LOCKS_PASSWORD").then(|| "s3cret".into());
        assert_eq!(from_env.credentials_with(env).unwrap().expose_password(), Some("s3cret"));
        let error = from_env.credentials_with(no_env).unwrap_err();
        assert!(error.to_string().contains("LOCKS_PASSWORD is not set"), "{error}");

        let from_url = config("etcd://you:s3cret@h").credentials_with(no_env).unwrap();
        assert_eq!((from_url.user(), from_url.expose_password()), (Some("you"), Some("s3cret")));

        std::fs::write(&file, "\n").unwrap();
        let error = from_file.credentials_with(no_env).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Misconfigured);
        assert!(error.to_string().contains("is empty"), "{error}");
        std::fs::remove_dir_all(&folder).unwrap();
        let error = from_file.credentials_with(no_env).unwrap_err();
        assert!(error.to_string().contains("cannot be read"), "{error}");
    }

    #[test]
    fn options_are_read_by_their_form_and_the_unknown_one_is_named() {
        let config = config("x://h?busy=250ms&strict=true&count=3").with(|c| {
            c.options = [
                ("replicas", OptionValue::Text("majority".into())),
                ("pool", OptionValue::Whole(4)),
                ("lax", OptionValue::Flag(false)),
                ("timeout", OptionValue::Text("5 s".into())),
                ("wait-replica", OptionValue::Whole(-1)),
            ]
            .map(|(k, v)| (k.to_owned(), v))
            .into();
        });
        let mut options = config.options().unwrap();
        assert_eq!(options.duration("busy").unwrap(), Some(Duration::from_millis(250)));
        assert_eq!(options.flag("strict").unwrap(), Some(true));
        assert_eq!(options.flag("lax").unwrap(), Some(false));
        assert_eq!(options.whole("count").unwrap(), Some(3));
        assert_eq!(options.whole("pool").unwrap(), Some(4));
        assert_eq!(options.text("replicas").unwrap().as_deref(), Some("majority"));
        assert_eq!(options.text("absent").unwrap(), None);
        let error = options.duration("timeout").unwrap_err();
        assert!(error.to_string().contains("\"timeout\": \"5 s\" is not a duration"), "{error}");
        let error = options.finish().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Misconfigured);
        assert_eq!(
            error.to_string(),
            "the option \"wait-replica\" is not known here; have busy, strict, lax, count, pool, replicas, absent, timeout"
        );

        let mut options = config.options().unwrap();
        assert!(options.whole("wait-replica").unwrap_err().to_string().contains("zero or more"));
        assert!(options.text("pool").unwrap_err().to_string().contains("is not text"));
        assert!(options.flag("replicas").unwrap_err().to_string().contains("true or false"));
    }

    #[test]
    fn an_option_stands_once() {
        let twice = config("x://h?a=1").with(|c| {
            c.options.insert("a".into(), OptionValue::Whole(1));
        });
        assert!(
            twice.options().unwrap_err().to_string().contains("\"a\" stands in `options` and in the URL")
        );
    }
}
