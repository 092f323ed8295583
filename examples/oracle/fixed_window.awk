# What a fixed window must allow and deny on an access log in Combined format, counted without any
# of weir's code: requests are put into boxes, one for each key and window, and of a box holding n
# of them min(n, limit) pass. The order of lines does not matter for that.
#
#   LC_ALL=C awk -v key=ip -v limit=10 -v window=60 -f fixed_window.awk access.log
#
# key: entries separated by commas, of ip user method path status; window: seconds. Prints
# "requests N", "malformed N", "allowed N", "denied N" (of requests that have every entry of the
# key) and "key N TEXT" for each key that was denied N times.

BEGIN {
  split("Jan Feb Mar Apr May Jun Jul Aug Sep Oct Nov Dec", names, " ")
  for (i = 1; i <= 12; ++i) month_number[names[i]] = i
  split("31 28 31 30 31 30 31 31 30 31 30 31", month_days, " ")
  parts = split(key, wanted, ",")
  d = "[0-9]"
  time = d d "/[A-Z][a-z][a-z]/" d d d d ":" d d ":" d d ":" d d " [-+]" d d d d
  quoted = "\"([^\"\\\\]|\\\\.)*\""
  combined = "^[^ ]+ [^ ]+ [^ ]+ \\[" time "\\] " quoted " " d d d " (-|" d "+) " quoted " " quoted "\r?$"
}

function is_leap(year) { return (year % 4 == 0 && year % 100 != 0) || year % 400 == 0 }

# Seconds since 1970 of "17/May/2015:10:05:03 +0000"; -1 if there is no such time. Years are walked
# one by one: slow and plain.
function seconds(text,    day, month, year, days, y, m, zone) {
  day = substr(text, 1, 2) + 0
  month = month_number[substr(text, 4, 3)]
  year = substr(text, 8, 4) + 0
  if (!month || day < 1 || day > month_days[month] + (month == 2 && is_leap(year))) return -1
  if (year < 1970 || year > 2199) return -1
  if (substr(text, 13, 2) > 23 || substr(text, 16, 2) > 59 || substr(text, 19, 2) > 60) return -1
  if (!(year in days_before)) {
    days = 0
    for (y = 1970; y < year; ++y) days += 365 + is_leap(y)
    days_before[year] = days
  }
  days = days_before[year] + day - 1
  for (m = 1; m < month; ++m) days += month_days[m] + (m == 2 && is_leap(year))
  zone = substr(text, 23, 2) * 3600 + substr(text, 25, 2) * 60
  if (substr(text, 22, 1) == "-") zone = -zone
  return days * 86400 + substr(text, 13, 2) * 3600 + substr(text, 16, 2) * 60 + substr(text, 19, 2) - zone
}

{
  if ($0 !~ combined) { ++malformed; next }
  open = index($0, "[")
  now = seconds(substr($0, open + 1, 26))
  match($0, quoted)
  request = substr($0, RSTART + 1, RLENGTH - 2)
  status = substr($0, RSTART + RLENGTH + 1, 3)
  if (now < 0 || request !~ /^[^ ]+ [^ ].*$/) { ++malformed; next }
  ++requests

  value["ip"] = $1
  value["user"] = $3 == "-" ? "" : $3
  value["status"] = status
  space = index(request, " ")
  value["method"] = substr(request, 1, space - 1)
  path = substr(request, space + 1)
  sub(/ HTTP\/[^ ]*$/, "", path)
  sub(/\?.*$/, "", path)
  sub(/^[a-z]+:\/\/[^\/]+/, "", path)
  value["path"] = path

  text = ""
  for (i = 1; i <= parts; ++i) {
    if (value[wanted[i]] == "") next
    text = text (i > 1 ? ", " : "") value[wanted[i]]
  }
  ++box[text, int(now / window)]
}

END {
  for (at in box) {
    text = substr(at, 1, index(at, SUBSEP) - 1)
    pass = box[at] < limit ? box[at] : limit
    allowed += pass
    denied += box[at] - pass
    if (box[at] > pass) denied_of[text] += box[at] - pass
  }
  printf "requests %.0f\nmalformed %.0f\nallowed %.0f\ndenied %.0f\n", requests, malformed, allowed, denied
  for (text in denied_of) printf "key %.0f %s\n", denied_of[text], text
}
