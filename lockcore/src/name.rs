//! What a lock is called.

use std::{fmt, str::FromStr, sync::Arc};

use crate::error::{Error, ErrorKind, Result};

/// Names one lock: one to eight segments; the text form joins them with `/` and escapes inside a segment.
///
/// # Shape
/// The text form is what people read and what backends encode. Inside a segment `/` is written `%2F` and `%`
/// is written `%25`, so different lists of segments never share a text form.
///
/// # Units
/// At most [`MAX_LEN`](Self::MAX_LEN) bytes of text form and [`MAX_SEGMENTS`](Self::MAX_SEGMENTS) segments, the
/// same on every backend. What a store cannot carry travels as a hash.
///
/// # Example
/// ```
/// use lockcore::LockName;
///
/// let trusted = LockName::parse("order/42")?;
/// let literal = LockName::from_segments(["upload", "../etc/passwd"])?;
/// assert_eq!(trusted.segments().collect::<Vec<_>>(), ["order", "42"]);
/// assert_eq!(literal.as_str(), "upload/..%2Fetc%2Fpasswd");
/// # Ok::<(), lockcore::Error>(())
/// ```
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LockName(Arc<str>);

impl LockName {
    /// Longest accepted text form, in bytes.
    pub const MAX_LEN: usize = 512;
    /// Most segments a name may have.
    pub const MAX_SEGMENTS: usize = 8;

    /// Reads the text form, `order/42`: for literals and trusted text.
    ///
    /// # Errors
    /// `Invalid`: empty, an empty segment, too long, too many segments, a control character, or a `%` that does
    /// not begin `%2F` or `%25`.
    pub fn parse(text: &str) -> Result<Self> {
        check_length(text.len())?;
        let mut segments = 0;
        for segment in text.split('/') {
            segments += 1;
            check_segment(segment, segments)?;
            let mut rest = segment;
            while let Some(at) = rest.find('%') {
                if !matches!(rest.get(at + 1..at + 3), Some("2F" | "25")) {
                    return Err(invalid(
                        "a `%` in the text form of a lock name must begin `%2F` (a slash) or `%25` (a percent sign); \
                         give segments as an array to have them taken literally",
                    ));
                }
                rest = &rest[at + 3..];
            }
        }
        check_count(segments)?;
        Ok(Self(text.into()))
    }

    /// Builds a name from segments taken literally: for data that a user supplied.
    ///
    /// # Errors
    /// `Invalid`: as for [`parse`](Self::parse); the length counts the escaped form.
    pub fn from_segments<S: AsRef<str>>(segments: impl IntoIterator<Item = S>) -> Result<Self> {
        let mut text = String::new();
        let mut count = 0;
        for segment in segments {
            let segment = segment.as_ref();
            count += 1;
            check_count(count)?;
            check_length(text.len() + segment.len())?;
            check_segment(segment, count)?;
            if count > 1 {
                text.push('/');
            }
            for c in segment.chars() {
                match c {
                    '/' => text.push_str("%2F"),
                    '%' => text.push_str("%25"),
                    c => text.push(c),
                }
            }
        }
        check_count(count)?;
        check_length(text.len())?;
        Ok(Self(text.into()))
    }

    /// Returns the text form.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Lists the segments as they were before escaping.
    pub fn segments(&self) -> impl Iterator<Item = String> {
        self.0.split('/').map(|s| s.replace("%2F", "/").replace("%25", "%"))
    }

    /// Says whether this name is `prefix` or lies below it, segment by segment: `a/b` is under `a`, `ab` is not.
    pub fn is_under(&self, prefix: &LockName) -> bool {
        self.0.strip_prefix(prefix.as_str()).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
    }
}

/// Checks what becomes part of every key beside the name: empty, or at most 64 bytes of `A-Z a-z 0-9 . _ -`.
///
/// # Errors
/// `Invalid`, with the limit that was broken.
pub(crate) fn check_namespace(namespace: &str) -> Result<()> {
    if namespace.len() > 64 {
        return Err(invalid(format!("a namespace is at most 64 bytes, this one has {}", namespace.len())));
    }
    match namespace.chars().find(|c| !(c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-'))) {
        Some(c) => Err(invalid(format!("a namespace is made of A-Z a-z 0-9 . _ and -, not {c:?}"))),
        None => Ok(()),
    }
}

fn check_length(len: usize) -> Result<()> {
    match len {
        0 => Err(invalid("a lock name is empty; it has one to eight segments, like `order/42`")),
        1..=LockName::MAX_LEN => Ok(()),
        _ => Err(invalid(format!("a lock name is at most {} bytes, this one has {len}", LockName::MAX_LEN))),
    }
}

fn check_count(segments: usize) -> Result<()> {
    match segments {
        0 => Err(invalid("a lock name has no segment; it has one to eight, like `order/42`")),
        1..=LockName::MAX_SEGMENTS => Ok(()),
        _ => Err(invalid(format!("a lock name has at most {} segments", LockName::MAX_SEGMENTS))),
    }
}

fn check_segment(segment: &str, number: usize) -> Result<()> {
    if segment.is_empty() {
        return Err(invalid(format!("segment {number} of a lock name is empty")));
    }
    match segment.chars().find(|c| c.is_control()) {
        Some(c) => Err(invalid(format!("segment {number} of a lock name has the control character {c:?}"))),
        None => Ok(()),
    }
}

fn invalid(message: impl Into<std::borrow::Cow<'static, str>>) -> Error {
    Error::new(ErrorKind::Invalid, message)
}

impl fmt::Display for LockName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for LockName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", &*self.0)
    }
}

impl FromStr for LockName {
    type Err = Error;
    fn from_str(text: &str) -> Result<Self> {
        Self::parse(text)
    }
}

/// Anything that names a lock: `&str`, `String`, `LockName`, `&LockName` (text form), `[S; N]` (segments, literally).
pub trait IntoLockName: sealed::Sealed {
    /// Converts.
    ///
    /// # Errors
    /// `Invalid`, as [`LockName::parse`] and [`LockName::from_segments`].
    fn into_lock_name(self) -> Result<LockName>;
}

impl IntoLockName for &str {
    fn into_lock_name(self) -> Result<LockName> {
        LockName::parse(self)
    }
}
impl IntoLockName for String {
    fn into_lock_name(self) -> Result<LockName> {
        LockName::parse(&self)
    }
}
impl IntoLockName for &String {
    fn into_lock_name(self) -> Result<LockName> {
        LockName::parse(self)
    }
}
impl IntoLockName for LockName {
    fn into_lock_name(self) -> Result<LockName> {
        Ok(self)
    }
}
impl IntoLockName for &LockName {
    fn into_lock_name(self) -> Result<LockName> {
        Ok(self.clone())
    }
}
impl<S: AsRef<str>, const N: usize> IntoLockName for [S; N] {
    fn into_lock_name(self) -> Result<LockName> {
        LockName::from_segments(self)
    }
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for &str {}
    impl Sealed for String {}
    impl Sealed for &String {}
    impl Sealed for super::LockName {}
    impl Sealed for &super::LockName {}
    impl<S: AsRef<str>, const N: usize> Sealed for [S; N] {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn segments_and_text_form_are_bijective() {
        let hostile = [
            vec!["a"],
            vec!["a/b"],
            vec!["a", "b"],
            vec!["a%2Fb"],
            vec!["%"],
            vec!["%25"],
            vec!["{}", "}{", "{a}{b}"],
            vec!["..", ".", "~"],
            vec!["é", "e\u{301}", "🔒"],
        ];
        let mut seen = std::collections::BTreeSet::new();
        for segments in hostile {
            let name = LockName::from_segments(&segments).unwrap();
            assert_eq!(name.segments().collect::<Vec<_>>(), segments);
            assert_eq!(LockName::parse(name.as_str()).unwrap(), name);
            assert!(seen.insert(name.clone()), "two lists of segments share {name}");
        }
    }

    #[test]
    fn bad_names_are_refused_with_the_limit() {
        let long = "x".repeat(513);
        let huge = "x".repeat(1 << 20);
        for (text, says) in [
            ("", "empty"),
            ("a//b", "segment 2"),
            ("/a", "segment 1"),
            ("a/", "segment 2"),
            ("a\0b", "control character"),
            ("a\nb", "control character"),
            ("50%", "%25"),
            ("a%00", "%2F"),
            ("1/2/3/4/5/6/7/8/9", "at most 8 segments"),
            (&long, "at most 512 bytes, this one has 513"),
            (&huge, "at most 512 bytes"),
        ] {
            let error = LockName::parse(text).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Invalid);
            assert!(error.to_string().contains(says), "{text:.20?}: {error}");
        }
        assert_eq!(LockName::parse(&"x".repeat(512)).unwrap().as_str().len(), 512);
        assert!(LockName::from_segments(["/".repeat(171)]).is_err(), "the escaped form counts");
        assert!(LockName::from_segments(Vec::<&str>::new()).is_err());
    }

    #[test]
    fn a_prefix_ends_at_a_segment() {
        let name = |t: &str| LockName::parse(t).unwrap();
        assert!(name("a/b").is_under(&name("a")));
        assert!(name("a").is_under(&name("a")));
        assert!(!name("ab").is_under(&name("a")));
    }

    #[test]
    fn namespaces_keep_to_their_alphabet() {
        assert!(check_namespace("").is_ok());
        assert!(check_namespace("shop-prod_2.eu").is_ok());
        assert!(check_namespace("a/b").is_err());
        assert!(check_namespace(&"n".repeat(65)).is_err());
    }
}
