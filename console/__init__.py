"""The console: a web application that shows a cluster, served by `tidelog console` or by a broker's admin HTTP.

The pages are static files (`tidelog/console/static`), and draw what the JSON API under `/console/api/` tells. The API
adds no knowledge of its own: it passes requests on to the admin HTTP of the brokers (`tidelog.console.link`), and asks
the brokers as any Kafka client does (`tidelog.console.kafka`). So it runs anywhere, and knows of a broker only what its
ports tell. docs/design/0030-console.md says why, docs/console.md what there is to see.

Invariants: without a session nothing is shown or done in a cluster with a secret; no request of another web page has an
effect or an answer (`tidelog.console.guard`); only listed paths of the admin HTTP are passed on
(`tidelog.console.passed_on`); what records contain is passed as JSON strings, and the pages make text nodes of it,
never markup; records, searches and sessions are bounded (rule 12).

May import: `tidelog.runtime`. Entry: `tidelog.console.app.console_app`.
"""
