//! Timelines: what happened to one lock, drawn for people, as text and as SVG.
//!
//! Both show one lane for each client and one for each resource, with the spans in which a client believed that it
//! held the lock. Two such spans side by side are what a lock must never show.

mod scene;
mod svg;
mod text;

pub use svg::svg;
pub(crate) use svg::svg_in_a_page;
pub use text::text;
